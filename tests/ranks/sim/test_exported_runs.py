# SPDX-License-Identifier: Apache-2.0
"""Runs that ranks really made, recorded and written for other simulators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from goal_reader import play, read

from commrt import trace
from commrt.algorithms import schedule
from commrt.local import run
from commrt.schedule.ir import Op
from commrt.sim.goal import goal_of_tasks
from commrt.sim.log_tasks import log_tasks
from commrt.trace.job import join
from commrt.trace.recorder import recorder


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    recorder().clear()
    yield
    recorder().clear()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_recorded_run_can_be_played_message_by_message(size: int) -> None:
    algorithms = {"allreduce": "halving_doubling", "allgather": "ring"}

    def main(comm: Any) -> None:
        x = np.ones(12 * size, np.float32)
        with_neighbour = comm.allreduce(
            x, algorithm="halving_doubling", nonblocking=True
        )
        comm.allgather(np.ones(7, np.float32), algorithm="ring")
        with_neighbour.wait()
        if comm.rank == 0:
            comm.send(x[:5].copy(), dest=size - 1, tag=3)
        if comm.rank == size - 1:
            comm.recv(np.empty(9, np.float32), source=0, tag=3)
        comm.barrier()

    with trace.record() as recording:
        run(size, main, timeout_s=300)
    made = log_tasks(join(recording.logs()))
    ranks = read(goal_of_tasks(size, made.ranks))
    assert play(ranks) == sum(map(len, made.ranks))
    for rank, tasks in enumerate(made.ranks):
        for op, name in algorithms.items():
            sends = [
                one.nbytes
                for one in tasks
                if one.kind == "send" and one.name.startswith(f"{op} ")
            ]
            program = schedule(op, name, size).program(rank)
            length = 12 * size if op == "allreduce" else 7 * size
            bounds = [space.bounds(length) for space in program.spaces]
            wanted = [
                4 * (bounds[src.space][src.hi] - bounds[src.space][src.lo])
                for step in program.steps
                if step.op is Op.SEND and (src := step.src) is not None
            ]
            assert sends == wanted
    messages = [one for one in made.ranks[0] if one.name.startswith("send at")]
    assert [(one.nbytes, one.peer) for one in messages] == [(20, size - 1)]
