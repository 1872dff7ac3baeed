# SPDX-License-Identifier: Apache-2.0
"""A gather whose input is its block of the output is exact, and copies it only where
the schedule needs that."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from commrt import algorithms
from commrt.calls import arguments
from commrt.local import run
from commrt.planning.own_blocks import leaves_own_block
from commrt.schedule.lower import LOCAL, lower

DEADLINE_S = 240.0
GATHERS = ("allgather", "gather", "allgatherv", "gatherv")
SIZES = (1, 2, 3, 4, 5, 8)
EVERY = [
    (coll, name, size)
    for coll in GATHERS
    for size in SIZES
    for name in algorithms.names(coll, size)
]


def counts_of(coll: str, size: int, length: int) -> list[int]:
    """Return each rank's elements: uneven, and none on one rank, where that may be."""
    if not coll.endswith("v"):
        return [length] * size
    return [0 if rank == 1 else length + 3 * rank for rank in range(size)]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of inputs that calls have copied."""
    found: list[int] = []
    made = arguments.copy_of

    def noted(x: Any) -> Any:
        found.append(x.address)
        return made(x)

    monkeypatch.setattr(arguments, "copy_of", noted)
    return found


def expects_copy(coll: str, name: str, size: int, rank: int) -> bool:
    schedule = algorithms.schedule(coll, name, size)
    return not leaves_own_block(lower(schedule, rank))


@pytest.mark.full(sample=24)
@pytest.mark.parametrize(("coll", "name", "size"), EVERY)
@pytest.mark.parametrize("length", [1, 700, 70_001])
def test_each_algorithm_gathers_own_blocks_in_place(
    coll: str, name: str, size: int, length: int, copies: list[int]
) -> None:
    counts = counts_of(coll, size, length)
    edges = [0, *np.cumsum(counts).tolist()]
    whole = np.arange(float(edges[-1]))
    more: dict[str, Any] = {"counts": counts} if coll.endswith("v") else {}

    def rank_main(comm: Any) -> tuple[int, int]:
        low, high = edges[comm.rank], edges[comm.rank + 1]
        receives = coll.startswith("all") or comm.rank == 0
        for planned in (False, True):
            out = np.full(len(whole), -1.0)
            out[low:high] = whole[low:high]
            mine = out[low:high]
            given = {**more, "algorithm": name, "out": out if receives else None}
            if planned:
                plan = getattr(comm.plan, coll)(mine, **given)
                for factor in (1.0, 2.0):  # what the block holds when it runs
                    out[:low], out[high:] = -1.0, -1.0
                    mine[:] = factor * whole[low:high]
                    got = plan()
                    assert not receives or (out == factor * whole).all()
            else:
                got = getattr(comm, coll)(mine, **given)
                assert not receives or (out == whole).all()
            assert (got is out) == receives
        return comm.rank, mine.ctypes.data if receives and high > low else 0

    placed = run(size, rank_main, timeout_s=DEADLINE_S)
    wanted = [
        rank
        for rank, address in placed
        if address and expects_copy(coll, name, size, rank)
    ]
    assert len(copies) == 2 * len(wanted)


def test_usual_algorithms_need_no_copy() -> None:
    """They write this block only from the input, also those that rotate blocks."""
    for name in ("ring", "direct", "bidirectional_ring", "dissemination"):
        for rank in range(4):
            assert not expects_copy("allgatherv", name, 4, rank)
    # The rank that is folded into its neighbour receives all blocks from it.
    folded = [expects_copy("allgather", "recursive_doubling", 3, r) for r in range(3)]
    assert folded == [False, True, False]


def test_a_program_that_stores_another_value_there_needs_a_copy() -> None:
    """The block that a ring receives first is put into the own one, for a while."""
    one = lower(algorithms.schedule("allgather", "ring", 3), 1)
    assert leaves_own_block(one)
    others = [
        row
        for row, (kind, space, low, _) in enumerate(one.outputs.tolist())
        if kind == LOCAL and space == 1 and low != 1
    ]
    assert others
    for row in others:
        changed = one.outputs.copy()
        changed[row, 2:4] = 1, 2
        assert not leaves_own_block(replace(one, outputs=changed))
        changed[row, 2:4] = 0, 3  # all blocks at once
        assert not leaves_own_block(replace(one, outputs=changed))


def test_the_block_of_another_rank_is_refused_as_input() -> None:
    def rank_main(comm: Any) -> str:
        out = np.zeros(4 * comm.size)
        other = (comm.rank + 1) % comm.size
        try:
            comm.allgather(out[4 * other : 4 * other + 4], out=out)
        except ValueError as error:
            return str(error)
        return ""

    for said in run(3, rank_main, timeout_s=DEADLINE_S):
        assert "out overlaps x" in said


def test_empty_blocks_before_an_own_one() -> None:
    """Blocks before this rank's that are empty put two ranks' blocks at one place."""

    def rank_main(comm: Any) -> list[float]:
        counts = [0, 5, 0, 3]
        edges = [0, *np.cumsum(counts).tolist()]
        low, high = [*pairwise(edges)][comm.rank]
        out = np.zeros(8)
        out[low:high] = 1 + comm.rank
        got: list[float] = comm.allgatherv(
            out[low:high], counts=counts, out=out
        ).tolist()
        return got

    for got in run(4, rank_main, timeout_s=DEADLINE_S):
        assert got == [2.0] * 5 + [4.0] * 3
