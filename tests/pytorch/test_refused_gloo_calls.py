# SPDX-License-Identifier: Apache-2.0
"""gloo's own collectives that some ranks refuse: all ranks stay in step.

gloo is given a call once the ranks have compared it, so it has none that was refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused_programs import NAMES, Array, Outcomes, Step, check, draw
from run_ranks import RunRanks

import commrt
from commrt import algorithms
from commrt.errors import CommError, RefusedError, RevokedError, UsageError

LIMIT_S = 300.0
GLOO = "gloo/native"
LENGTH = 40
# A barrier is compared with nothing; gloo has no scan, and no call without elements.
RUN_BY_GLOO = frozenset(NAMES) - {"barrier", "scan"}


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def steps_of(draws: str, where: str) -> list[Step]:
    """Return a program that mixes gloo's collectives with schedules."""
    counts = [int(count) for count in where.split(",")]
    of = tuple(node for node, count in enumerate(counts) for _ in range(count))

    def schedules(name: str) -> list[str]:
        found = list(algorithms.names(name, len(of), of))
        own = [GLOO] * max(3, 2 * len(found)) if name in RUN_BY_GLOO else []
        return own + found

    steps = draw(random.Random(draws), len(of), LENGTH, heap=False, schedules=schedules)
    return [step for step in steps if step.count or step.algorithm != GLOO]


def run_drawn(draws: str, where: str, most: int) -> dict[str, str]:
    """Run the program with at most so many calls in flight."""
    comm = commrt.init()
    own = random.Random(f"{draws} {comm.rank}")
    mine = Outcomes(comm.rank, comm.size)
    in_flight: list[tuple[Step, Callable[[], Any], list[Array]]] = []

    def end_first() -> None:
        step, finish, used = in_flight.pop(0)
        mine.note(step, finish)
        for array in used:
            array.fill(-1e9)  # nobody takes that for a value

    for step in steps_of(draws, where):
        used: list[Array] = []
        try:
            request = step.call(comm, None, used, nonblocking=True)
        except (UsageError, RefusedError) as error:
            mine.note(step, raiser(error))
        else:
            in_flight.append((step, lambda r=request: r.wait(timeout_s=LIMIT_S), used))
        while len(in_flight) >= most or (in_flight and own.random() < 0.3):
            end_first()
    while in_flight:
        end_first()
    total = comm.allreduce(np.ones(3), algorithm=GLOO)
    assert (total == comm.size).all()
    return {str(index): outcome for index, outcome in mine.of.items()}


def raiser(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("where", ["1,1", "2,1", "1,1,1"])
@pytest.mark.parametrize("turn", range(3))
def test_drawn_programs_stay_in_step_with_gloo(
    ranks: RunRanks, where: str, most: int, turn: int, seed: int
) -> None:
    draws = f"{seed} {where} {most} {turn}"
    size = sum(int(count) for count in where.split(","))
    env = {"COMMRT_NODES": where}
    found = ranks(size, run_drawn, env=env, draws=draws, where=where, most=most)
    outcomes = [
        Outcomes(rank, size, {int(index): outcome for index, outcome in own.items()})
        for rank, own in enumerate(found)
    ]
    check(steps_of(draws, where), outcomes)


def calls_barrier() -> list[str]:
    """Rank 1 refuses what gloo runs without a comparison before."""
    comm = commrt.init()
    found = []
    for _ in range(2):
        with pytest.raises(CommError) as raised:
            comm.barrier(algorithm=GLOO, timeout_s=-1 if comm.rank == 1 else None)
        found.append(type(raised.value).__name__)
    return found


def test_a_refused_barrier_of_gloo_ends_the_communicator(ranks: RunRanks) -> None:
    found = ranks(2, calls_barrier, env={"COMMRT_NODES": "1,1"})
    assert found == [[RevokedError.__name__] * 2, ["UsageError", "UsageError"]]
