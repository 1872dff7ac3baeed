# SPDX-License-Identifier: Apache-2.0
"""Operations between nodes go on while the program computes, on one core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi_ranks import MpiRun

import commrt
from commrt.comm import core_of

COUNT = 1 << 18
"""Elements of 8 bytes: many messages, one behind the other."""
LIMIT_S = 120.0


def _sum(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    x = np.full(COUNT, comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    return [comm.allreduce(x, nonblocking=True)], x, np.full(COUNT, total)


def _broadcast(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    right = np.arange(COUNT, dtype=np.float64)
    x = right.copy() if comm.rank == 0 else np.zeros(COUNT)
    return [comm.bcast(x, root=0, nonblocking=True)], x, right


def _blocks(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    count = COUNT // comm.size
    x = np.full(count * comm.size, comm.rank + 1.0)
    out = np.zeros(count * comm.size)
    right = np.repeat(np.arange(comm.size) + 1.0, count)
    return [comm.alltoall(x, out=out, nonblocking=True)], out, right


def _messages(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = np.zeros(COUNT)
    requests = [
        comm.recv(out, source=before, nonblocking=True),
        comm.send(np.full(COUNT, comm.rank + 1.0), dest=after, nonblocking=True),
    ]
    return requests, out, np.full(COUNT, before + 1.0)


def _many_sums(comm: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    rows = np.full((5, COUNT // 8), comm.rank + 1.0)
    requests = [comm.allreduce(row, nonblocking=True) for row in rows]
    return requests, rows, np.full_like(rows, comm.size * (comm.size + 1) / 2)


Begin = Callable[[Any], tuple[list[Any], np.ndarray, np.ndarray]]
CALLS: dict[str, Begin] = {
    "allreduce": _sum,
    "bcast": _broadcast,
    "alltoall": _blocks,
    "messages": _messages,
    "many": _many_sums,
}


def computes_until_it_is_there(name: str, waits_for_another: bool) -> list[Any]:
    """Start a call, and compute until its result lies in memory, without any call."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    comm = commrt.init()
    assert not core_of(comm).world.engine.has_thread
    requests, found, right = CALLS[name](comm)
    if waits_for_another:
        comm.dup().allreduce(np.ones(1))
    limit = time.monotonic() + LIMIT_S
    while not np.array_equal(found, right):
        if time.monotonic() > limit:
            return ["nothing came", int((found != right).sum())]
    commrt.wait_all(requests)
    comm.barrier()
    return ["there"]


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("waits_for_another", [False, True])
@pytest.mark.parametrize("nodes", ["1,1", "1,1,1", "2,1"])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_computes_gets_what_it_asked_for(
    mpirun: MpiRun, name: str, nodes: str, waits_for_another: bool
) -> None:
    size = sum(map(int, nodes.split(",")))
    found = mpirun(
        size,
        computes_until_it_is_there,
        env={"COMMRT_NODES": nodes, "COMMRT_CARRIER": "tcp"},
        name=name,
        waits_for_another=waits_for_another,
    )
    assert found == [["there"]] * size
