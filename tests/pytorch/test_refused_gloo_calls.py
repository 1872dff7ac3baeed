# SPDX-License-Identifier: Apache-2.0
"""gloo's own collectives that some ranks refuse: all ranks stay in step.

gloo is given a call once the ranks have compared it, so it has none that was refused.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch.distributed  # noqa: F401  gloo runs only where every rank has imported it
from refused_programs import NAMES, Step, check_found, draw, run_program
from run_ranks import RunRanks

import commrt
from commrt import algorithms

LIMIT_S = 300.0
GLOO = "gloo/native"
LENGTH = 40
# gloo has no scan, and no call without elements.
RUN_BY_GLOO = frozenset(NAMES) - {"scan"}
WITHOUT_LENGTH = ("barrier", "alltoallv")


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
    return [
        step
        for step in steps
        if step.count or step.name in WITHOUT_LENGTH or step.algorithm != GLOO
    ]


def run_drawn(draws: str, where: str, most: int) -> dict[str, str]:
    """Run the program with at most so many calls in flight."""
    comm = commrt.init()
    found = run_program(comm, steps_of(draws, where), draws, most, LIMIT_S)
    total = comm.allreduce(np.ones(3), algorithm=GLOO)
    assert (total == comm.size).all()
    return found


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("where", ["1,1", "2,1", "1,1,1"])
@pytest.mark.parametrize("turn", range(3))
def test_drawn_programs_stay_in_step_with_gloo(
    ranks: RunRanks, where: str, most: int, turn: int, seed: int
) -> None:
    check_drawn(ranks, f"{seed} {where} {most} {turn}", where, most)


@pytest.mark.timeout(280)
def test_ranks_in_gloo_need_not_look_at_refusals(ranks: RunRanks) -> None:
    """Rank 2 waited for their answer, and they in gloo for rank 2."""
    check_drawn(ranks, "24 2,1 1 0", "2,1", 1)


def check_drawn(ranks: RunRanks, draws: str, where: str, most: int) -> None:
    """Run a program on all ranks, and check what became of each call."""
    size = sum(int(count) for count in where.split(","))
    env = {"COMMRT_NODES": where}
    found = ranks(size, run_drawn, env=env, draws=draws, where=where, most=most)
    check_found(steps_of(draws, where), found)
