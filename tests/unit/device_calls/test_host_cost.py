# SPDX-License-Identifier: Apache-2.0
"""The program that measures what a call on a device array costs its caller."""

from __future__ import annotations

import host_cost
import pytest


def test_the_cost_of_calls_is_measured_without_python_in_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")
    rows = host_cost.main(["--calls", "64"])
    printed = capsys.readouterr().out
    assert [row.what.partition("/")[0] for row in rows] == ["staged"] * 4 + ["nccl"] * 4
    assert [row.is_known for row in rows] == [True, True, True, False] * 2
    for row in rows:
        assert row.what in printed
        assert row.call_us > row.device_us > 0
        # A call gives a stream of its own what the caller's is waited for, and its end.
        assert 5 <= row.num_calls <= 20, row
