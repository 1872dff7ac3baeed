# SPDX-License-Identifier: Apache-2.0
"""MPI makes communicators for commrt while messages of commrt are on their way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi_ranks import MpiRun

import commrt

ELEMENTS = 60_000


def made_beside_messages(call: str) -> list[Any]:
    """The halves make MPI communicators while a call of theirs is in flight."""
    comm = commrt.init()
    said: list[Any] = []
    for _ in range(4):
        part = comm.split(comm.rank % 2)
        assert part is not None
        mine = np.full(ELEMENTS, 2.0**comm.rank)
        if call == "steps":
            request = part.allreduce(mine, nonblocking=True, algorithm="ring")
        else:
            right, left = (part.rank + 1) % part.size, (part.rank - 1) % part.size
            request = part.recv(np.empty(ELEMENTS), left, nonblocking=True)
            part.send(mine, right, nonblocking=True)
        made = part.mpi
        assert made is not None
        said.append([float(request.wait()[-1]), made.allreduce(comm.rank)])
        part.free()
    return said


@pytest.mark.parametrize("call", ["steps", "messages"])
@pytest.mark.parametrize(("size", "nodes"), [(6, "1"), (5, "1,4")])
def test_messages_in_flight_are_not_taken_for_those_of_mpi(
    mpirun: MpiRun, size: int, nodes: str, call: str
) -> None:
    said = mpirun(size, made_beside_messages, env={"COMMRT_NODES": nodes}, call=call)
    for rank, rounds in enumerate(said):
        part = [*range(rank % 2, size, 2)]
        left = part[part.index(rank) - 1]
        value = sum(2.0**each for each in part) if call == "steps" else 2.0**left
        assert rounds == [[value, sum(part)]] * 4
