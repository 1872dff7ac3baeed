# SPDX-License-Identifier: Apache-2.0
"""Symmetric buffers between processes, on one node and across pretended nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import run_cases, sample
from heap_memory import HeapMemory

import commrt
from commrt.comm import core_of
from commrt.errors import MismatchError, TimeoutError_
from commrt.planning import host_plans
from commrt.vocabulary.operations import COLLECTIVES

NODES = [(2, ""), (3, ""), (3, "2,1"), (4, ""), (4, "2,2"), (4, "1,3")]


def nodes(text: str) -> dict[str, str]:
    """Return the environment that pretends these nodes."""
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def run_samples(seed: int, number: int) -> list[str]:
    host_plans.SYMMETRIC_NBYTES = 64
    comm = commrt.init()
    memory = HeapMemory(comm, 2 << 20, str(seed))
    wrong: list[str] = []
    for coll in COLLECTIVES:
        wrong += run_cases(comm, sample(coll, comm.size, seed, number), memory)
    return wrong


@pytest.mark.parametrize(("size", "where"), NODES)
def test_any_mixture_agrees_with_numpy(
    mpirun: Any, size: int, where: str, seed: int
) -> None:
    got = mpirun(size, run_samples, env=nodes(where), seed=seed, number=15)
    assert got == [[]] * size


def root_is_read(symmetric: bool) -> list[bool]:
    """Rank 0 broadcasts before rank 1 calls; is its operation over by then?"""
    comm = commrt.init()
    x = comm.empty(50_000) if symmetric else np.empty(50_000, np.float32)
    comm.empty(1)
    x[:] = comm.rank + 3
    over = False
    if comm.rank == 0:
        request = comm.bcast(x, algorithm="direct", nonblocking=True)
        over = any(request.test() for _ in range(100))
    core_of(comm).world.meet(range(2), "root is read")
    if comm.rank == 0:
        request.wait()
    else:
        comm.bcast(x, algorithm="direct")
    return [over, bool((x == 3).all())]


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_peers_read_in_place_is_kept_until_they_have(
    mpirun: Any, symmetric: bool
) -> None:
    # 200 KB fit into slots: with a copy there the root is done at once.
    first, second = mpirun(2, root_is_read, symmetric=symmetric)
    assert first == [not symmetric, True]
    assert second == [False, True]


def unequal_and_late() -> list[Any]:
    comm = commrt.init()
    said = []
    try:
        comm.empty(1000 * (1 + comm.rank))
    except MismatchError as error:
        said.append(str(error))
    comm.timeout_s = 0.3
    if comm.rank == 0:
        with pytest.raises(TimeoutError_):
            comm.empty(1000)
        said.append("late")
    core_of(comm).world.meet(range(comm.size), "unequal and late")
    return said


def test_unequal_and_late_requests(mpirun: Any) -> None:
    first, second = mpirun(2, unequal_and_late)
    assert "rank 0 4000, rank 1 8000" in first[0]
    assert second == first[:1]
    assert first[1] == "late"
