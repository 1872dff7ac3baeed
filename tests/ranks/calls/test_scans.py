# SPDX-License-Identifier: Apache-2.0
"""scan and exscan: prefixes on every number of ranks, and what rank 0 is left with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, run_cases, ways

from commrt.local import run
from commrt.vocabulary.operations import operation

SCANS = ("scan", "exscan")


@pytest.mark.parametrize("coll", SCANS)
def test_ranks_may_differ_in_place_and_out_of_place(coll: str) -> None:
    def rank_main(comm: Any) -> list[str]:
        in_place = comm.rank % 2 == 0
        cases = [
            Case(coll, 5, name, params, count=count, in_place=in_place)
            for name, params in ways(coll, 5)
            for count in (3, 30_000)
        ]
        return run_cases(comm, cases)

    assert run(5, rank_main, timeout_s=300) == [[]] * 5


def test_an_exscan_returns_what_rank_0_gave_as_it_was() -> None:
    def rank_main(comm: Any) -> list[Any]:
        out = np.full(2, -7.0)
        x = np.full(2, comm.rank + 1.0)
        assert comm.exscan(x, out=out) is out
        assert comm.exscan(x) is x
        request = comm.exscan(np.full(2, comm.rank + 1.0), out=out, nonblocking=True)
        assert request.wait() is out
        return [out.tolist(), x.tolist()]

    assert run(3, rank_main) == [
        [[-7.0, -7.0], [1.0, 1.0]],
        [[1.0, 1.0], [1.0, 1.0]],
        [[3.0, 3.0], [3.0, 3.0]],
    ]
    assert run(1, rank_main) == [[[-7.0, -7.0], [1.0, 1.0]]]


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("op", ["land", "lor", "lxor"])
@pytest.mark.parametrize("coll", SCANS)
def test_a_single_contribution_to_a_logical_reduction_is_0_or_1(
    coll: str, op: str, count: int
) -> None:
    first = 0 if coll == "scan" else 1

    def rank_main(comm: Any) -> list[list[float]]:
        found = []
        for name, params in ways(coll, comm.size):
            for in_place in (False, True):
                x = np.resize([0.0, 7.0, -2.0], count).astype(np.float32)
                out = x if in_place else np.full_like(x, 9)
                how = {"op": op, "algorithm": name, "params": params}
                getattr(comm, coll)(x, out=out, **how)
                found.append(out.tolist())
        return found

    for size in (first + 1, 4):
        for out in run(size, rank_main)[first]:
            assert out == np.resize([0, 1, 1], count).tolist()


def test_nan_reaches_the_ranks_above_and_no_other() -> None:
    def rank_main(comm: Any) -> list[list[bool]]:
        x = np.full(3, np.nan if comm.rank == 2 else 1.0)
        return [
            np.isnan(getattr(comm, coll)(x, out=np.zeros(3), op="max")).tolist()
            for coll in SCANS
        ]

    found = run(4, rank_main)
    assert [each[0][0] for each in found] == [False, False, True, True]
    assert [each[1][0] for each in found] == [False, False, False, True]


def test_floats_give_the_same_bits_in_every_run() -> None:
    def rank_main(comm: Any) -> list[bytes]:
        x = np.random.default_rng(comm.rank).normal(size=40_000).astype(np.float32)
        return [
            getattr(comm, coll)(
                x, out=np.zeros_like(x), algorithm=n, params=p
            ).tobytes()
            for coll in SCANS
            for n, p in ways(coll, comm.size)
        ]

    assert run(5, rank_main) == run(5, rank_main)


@pytest.mark.parametrize("coll", SCANS)
def test_persistent_plans(coll: str) -> None:
    def rank_main(comm: Any) -> list[list[int]]:
        x, out = np.zeros(4, np.int32), np.zeros(4, np.int32)
        step = getattr(comm.plan, coll)(x, out=out, algorithm="chain")
        found = []
        for turn in range(3):
            x[:] = comm.rank + turn
            assert step() is out
            found.append(out.tolist())
        return found

    shift = 1 if coll == "scan" else 0
    for rank, found in enumerate(run(3, rank_main)):
        sums = [sum(r + turn for r in range(rank + shift)) for turn in range(3)]
        assert found == [[total] * 4 for total in sums]


def test_the_table_says_how_many_ranks_a_result_combines() -> None:
    numbers = {
        coll: [operation(coll).num_contributors(rank, 3) for rank in range(3)]
        for coll in ("allreduce", *SCANS)
    }
    assert numbers == {"allreduce": [3] * 3, "scan": [1, 2, 3], "exscan": [0, 1, 2]}
