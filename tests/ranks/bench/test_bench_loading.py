# SPDX-License-Identifier: Apache-2.0
"""The benchmark of loading measures three ways, and says what an exchange sends."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import loading
from commrt.local import run


@pytest.mark.parametrize("workload", loading.WORKLOADS)
@pytest.mark.parametrize("size", [1, 2])
def test_loading_is_measured_in_three_ways(size: int, workload: str) -> None:
    def main(comm: Any) -> dict[str, Any]:
        how: dict[str, Any] = {"nbytes": 20_000, "batch_size": 8}
        return loading.measure(comm, workload, fraction=0.5, turns=2, **how)

    for row in run(size, main):
        assert [*row["ms"]] == ["loader", "no thread", "take"]
        assert all(len(each) == 2 and min(each) > 0 for each in row["ms"].values())
        assert len(row["exchange_ms"]) == 2
        assert (row["exchange_nbytes"] > 0) == (size > 1 and workload != "imagenet")
        first, line = loading.text([row]).splitlines()
        assert first.split()[:2] == ["workload", "MB"]
        assert line.startswith(workload)


def test_an_unknown_workload_of_loading_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        loading.main(["--workload", "films"])
    assert "expected some of digits, mnist" in capsys.readouterr().err
