# SPDX-License-Identifier: Apache-2.0
"""The benchmark of exposed communication trains each workload in each way."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import exposed


def measured() -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("commrt")
    rows = exposed.measure([*exposed.WORKLOADS], rounds=2, steps=1)
    text = exposed._text(rows)
    dist.destroy_process_group()
    clocks = [row[clock] for row in rows for clock in ("ms", "cpu_ms")]
    counts = [[len(times) for times in clock.values()] for clock in clocks]
    positive = all(ms > 0 for clock in clocks for each in clock.values() for ms in each)
    ways = [[row["workload"], [*row["ms"]]] for row in rows]
    return [ways, counts, positive, len(text.splitlines())]


def test_each_workload_in_each_way(torchrun: Any) -> None:
    ways = [[name, ["commrt", "gloo", "none"]] for name in exposed.WORKLOADS]
    results = torchrun(2, measured, deadline_s=300)
    assert results == [[ways, [[2, 2, 2]] * 4, True, 5]] * 2


def test_exposed_is_the_difference_within_a_round() -> None:
    row = {"ms": {"commrt": [5, 9, 6], "none": [4, 7, 3]}}
    assert exposed.exposed_ms(row, "commrt") == 2


def test_a_workload_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        exposed.main(["--workload", "cnn-ddp,llm"])
    assert "--workload: llm: expected cnn-ddp, " in capsys.readouterr().err
