# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of neighbour collectives, redistribution and topk_allreduce."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.bench import cli, turns
from commrt.bench.options import TURNS
from commrt.local import run


def job_of(operation: str, **more: Any) -> dict[str, Any]:
    job = {"dtype": "float32", "grid": None, "periodic": True, "density": 0.01}
    return {"operation": operation, **job, **more}


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("operation", TURNS)
def test_what_is_timed_is_right_and_a_wrong_result_is_seen(
    operation: str, size: int, periodic: bool
) -> None:
    def rank_main(comm: Any) -> None:
        for nbytes in (4, 1000, 30_000):
            found = turns.ways(comm, job_of(operation, periodic=periodic), nbytes)
            assert next(iter(found.calls)) == "commrt"
            if operation != "topk_allreduce":  # it must have run to say anything
                got = found.calls["commrt"]()
                assert found.is_right()
                if got.any():
                    got[got != 0] += 1
                    assert not found.is_right()
                continue
            found.calls["commrt"]()
            assert found.is_right()

    run(size, rank_main, timeout_s=300)


def test_a_named_grid() -> None:
    def rank_main(comm: Any) -> int:
        job = job_of("neighbor_alltoall", grid=[4])
        return len(turns.ways(comm, job, 64).calls["commrt"]())

    assert run(4, rank_main, timeout_s=300) == [2 * 16] * 4


def test_what_people_write_with_mpi_turns_rows_into_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Alone:
        def Alltoallv(self, sends: Any, receives: Any) -> None:  # noqa: N802
            receives[0][...] = sends[0]

    mine = np.arange(9.0).reshape(3, 3)
    out = np.zeros((3, 3))
    monkeypatch.setattr(turns, "_byte", lambda: "BYTE")
    turns._mpi_turned(Alone(), mine, out, [(0, 3)])()
    assert np.array_equal(out, mine)


def test_the_text_has_a_line_per_size() -> None:
    rows = [
        {
            "size": 8,
            "valid": True,
            "samples_us": {"commrt": [1.0, 2.0], "mpi4py": [4.0]},
        },
        {"size": 16, "valid": False, "samples_us": {"commrt": [3.0], "mpi4py": [4.0]}},
    ]
    found = {
        "version": "1",
        "ranks": 4,
        "nodes": 1,
        "link_class": "near",
        "rows": rows,
    }
    lines = turns.text(job_of("neighbor_allgather", grid=[2, 2]), found).splitlines()
    assert "neighbor_allgather, 4 ranks on 1 node(s), links near" in lines[0]
    assert lines[0].endswith("2x2 grid, periodic")
    assert lines[2].split() == ["8", "1.50", "1.00", "4.00", "4.00", "0.38"]
    assert lines[3].endswith("0.75  WRONG")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("neighbor_alltoall --grid 2x2 --ranks 2", "has 4 places, expected 2"),
        ("neighbor_alltoall --grid 2y2", "--grid 2y2: write 1 to 5 numbers"),
        ("redistribute --open", "unknown argument '--open'"),
        ("topk_allreduce --density 2", "write numbers in 0..1"),
        ("redistribute -m 9:8", "1 <= MIN <= MAX"),
    ],
)
def test_wrong_usage_is_one_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
