# SPDX-License-Identifier: Apache-2.0
"""Objects, numbers, messages from anyone, between processes and between nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commrt

NODES = ("", "1,2", "1,1,1")
LENGTHS = (0, 1, 10_000, 1_000_003)


class Unpicklable:
    """Nothing makes bytes of it."""

    def __reduce__(self) -> Any:
        raise ValueError("not for sale")


def every_call(lengths: list[int]) -> list[Any]:
    """Return what goes wrong with objects that have arrays, and the texts of errors."""
    comm = commrt.init()
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    wrong = []
    for length in lengths:
        mine = rank, np.full(length, rank)
        sent = comm.send_object(mine, right, 3, nonblocking=True)
        came, source = comm.recv_object(tag=3, with_source=True)
        sent.wait()
        array = comm.send(mine[1], right, nonblocking=True)
        out = np.empty_like(mine[1])
        request = comm.recv(out, nonblocking=True)
        request.wait()
        array.wait()
        found = {
            left: came,
            source: came,
            request.source: (left, out),
            1: comm.bcast_object(mine if rank == 1 else None, 1),
            rank: comm.scatter_object([(r, np.full(length, r)) for r in range(size)]),
            **dict(enumerate(comm.allgather_object(mine))),
            **dict(enumerate(comm.gather_object(mine, 2) or ())),
        }
        wrong += [
            [length, of]
            for of, (said, values) in found.items()
            if said != of or values.shape != (length,) or (values != of).any()
        ]
    texts = []
    for call in (comm.bcast_object, comm.allgather_object, comm.gather_object):
        try:
            call(Unpicklable())
        except commrt.errors.UsageError as error:
            texts.append("not for sale" in str(error))
    return [wrong, texts, comm.allreduce(rank), comm.allreduce(0.5, op="max")]


def reductions_of_mpi() -> list[Any]:
    """Return what commrt makes of mpi4py's reductions, by position and by name."""
    from mpi4py import MPI

    comm = commrt.init()
    names = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
    found = []
    for name in names:
        x, op = np.array([comm.rank + 1, comm.rank % 2]), getattr(MPI, name)
        wanted = comm.allreduce(x.copy(), op=name.lower()).tolist()
        for _ in range(2):  # by Python, and then by the engine
            same = comm.allreduce(x.copy(), op).tolist() == wanted
            found.append(same and comm.reduce(x.copy(), 0, op=op) is not None)
    refused = []
    for op in (MPI.MAXLOC, MPI.REPLACE, MPI.OP_NULL, MPI.Op.Create(lambda *_: None)):
        try:
            comm.allreduce(np.ones(1), op=op)
        except commrt.errors.UsageError as error:
            refused.append("unknown reduction" in str(error))
    return [found, refused]


def test_reductions_of_mpi4py(mpirun: Any) -> None:
    first, second = mpirun(2, reductions_of_mpi)
    assert first == [[True] * 20, [True] * 4]
    assert second == [[False] * 20, [True] * 4]


@pytest.mark.parametrize("nodes", NODES)
def test_objects_and_numbers(mpirun: Any, nodes: str) -> None:
    env = {"COMMRT_NODES": nodes, "COMMRT_TIMEOUT_S": "300"} if nodes else {}
    found = mpirun(3, every_call, lengths=[*LENGTHS], env=env)
    assert found == [[[], [True] * 3, 3, 0.5]] * 3
