# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what a log costs compares each kind of call with itself."""

from __future__ import annotations

import pytest

from commrt.bench import recording
from commrt.trace.recorder import recorder


def test_a_line_for_each_kind_of_call(capsys: pytest.CaptureFixture[str]) -> None:
    before = len(recorder().ring)
    assert recording.main(["--blocks", "2", "--calls", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10].strip() for line in lines[1:]] == [
        *("allreduce(", "allgather(", "allreduce(", "plan.allre"),
    ]
    # Four kinds, two blocks with a recording each, and the calls before them.
    assert len(recorder().ring) == before + 4 * 2 * (20 + 2)
    assert recorder().users == 0
