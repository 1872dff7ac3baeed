# SPDX-License-Identifier: Apache-2.0
"""Collectives of an MPI library that some ranks refuse: all ranks stay in step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from refused_programs import Step, check_found, draw, run_program

import commrt
from commrt import algorithms
from commrt.errors import (
    CommError,
    RefusedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)

LIMIT_S = 300.0
NATIVE: dict[str, Any] = {"backend": "mpi", "algorithm": "native"}
PLACES = [(2, ""), (2, "1,1"), (3, "2,1"), (3, "1,1,1"), (4, "2,2"), (5, "1,3,1")]


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text} if text else {}


# -- drawn programs ------------------------------------------------------------------


def steps_of(draws: str, size: int, where: str, length: int) -> list[Step]:
    """Return a program that mixes the library's collectives with schedules."""
    counts = [int(count) for count in where.split(",")] if where else [size]
    of = tuple(node for node, count in enumerate(counts) for _ in range(count))

    def schedules(name: str) -> list[str]:
        found = list(algorithms.names(name, size, of))
        return ["native"] * max(3, 2 * len(found)) + found

    return draw(random.Random(draws), size, length, heap=False, schedules=schedules)


def run_drawn(draws: str, where: str, length: int, most: int) -> dict[str, str]:
    """Run the program with at most so many calls in flight; 0: blocking ones."""
    comm = commrt.init()
    steps = steps_of(draws, comm.size, where, length)
    found = run_program(comm, steps, draws, most, LIMIT_S)
    total = comm.allreduce(np.ones(3), **NATIVE)
    assert (total == comm.size).all()
    return found


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("most", [0, 1, 4])
@pytest.mark.parametrize(("size", "where"), PLACES)
@pytest.mark.parametrize("turn", range(3))
def test_drawn_programs_stay_in_step_with_the_library(
    mpirun: Any, size: int, where: str, most: int, turn: int, seed: int
) -> None:
    draws = f"{seed} {size} {where} {most} {turn}"
    program = {"draws": draws, "where": where, "length": 60}
    found = mpirun(size, run_drawn, env=nodes(where), most=most, **program)
    check_found(steps_of(draws, size, where, 60), found)


@pytest.mark.parametrize(
    ("draws", "size", "where", "most"),
    [
        # An alltoallv without contents was over before rank 1 refused it.
        ("693221 2 1,1 0 0", 2, "1,1", 0),
        # Rank 4 gave the library #30 before #29, behind a call that it had refused.
        ("1 5 1,3,1 4 0", 5, "1,3,1", 4),
    ],
)
def test_programs_that_came_out_of_step_once_do_not(
    mpirun: Any, draws: str, size: int, where: str, most: int
) -> None:
    program = {"draws": draws, "where": where, "length": 60}
    found = mpirun(size, run_drawn, env=nodes(where), most=most, **program)
    check_found(steps_of(draws, size, where, 60), found)


# -- one call ------------------------------------------------------------------------


def goes_on(comm: Any) -> bool:
    total = comm.allreduce(np.full(5, 2.0), **NATIVE)
    return bool((total == 2.0 * comm.size).all())


def refuse(comm: Any) -> None:
    """Make a call that is refused, in the place of any other."""
    with pytest.raises(UsageError):
        comm.barrier(timeout_s=-1)


def wait_in_vain() -> list[Any]:
    """Rank 1 does nothing for long after it has refused its call."""
    from mpi4py import MPI

    comm = commrt.init()
    goes_on(comm)
    found: list[Any] = []
    if comm.rank == 1:
        MPI.COMM_WORLD.Barrier()
        refuse(comm)
        MPI.COMM_WORLD.Barrier()
    else:
        request = comm.allreduce(np.ones(3), nonblocking=True, **NATIVE)
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(TimeoutError_, match="allreduce"):
            request.wait(timeout_s=0.5)
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(RefusedError, match="rank 1 has refused its call"):
            request.wait(timeout_s=LIMIT_S)
    found.append(goes_on(comm))
    return found


@pytest.mark.parametrize(("size", "where"), [(2, ""), (2, "1,1"), (3, "2,1")])
def test_a_deadline_ends_the_wait_for_the_rank_that_refused(
    mpirun: Any, size: int, where: str
) -> None:
    env = {**nodes(where), "COMMRT_PROGRESS": "off"}
    assert mpirun(size, wait_in_vain, env=env) == [[True]] * size


def root_is_ahead(ahead: int) -> list[str]:
    """The root has made many calls before another rank refuses its first."""
    from mpi4py import MPI

    comm = commrt.init()
    goes_on(comm)
    found = []
    if comm.rank == 0:
        for _ in range(ahead):
            comm.bcast(np.ones(2), **NATIVE)
    MPI.COMM_WORLD.Barrier()
    if comm.rank != 0:
        if comm.rank == 1:
            refuse(comm)
        for turn in range(comm.rank == 1, ahead):
            x = np.zeros(2)
            try:
                comm.bcast(x, **NATIVE)
                assert (x == 1).all(), turn
            except CommError as error:
                found.append(type(error).__name__)
                if isinstance(error, RevokedError):
                    return found
    try:
        assert goes_on(comm)
    except CommError as error:
        found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("where", ["", "1,1,1"])
def test_a_root_that_is_ahead_stays_in_step(mpirun: Any, where: str) -> None:
    first, second, third = mpirun(3, root_is_ahead, env=nodes(where), ahead=100)
    assert (first, second) == ([], [])
    assert third in ([], ["RefusedError"])


@pytest.mark.parametrize("where", ["", "1,1"])
def test_a_root_that_is_too_far_ahead_ends_the_communicator(
    mpirun: Any, where: str
) -> None:
    found = mpirun(2, root_is_ahead, env=nodes(where), ahead=400)
    assert found == [["RevokedError"]] * 2


def leave_for_good() -> list[str]:
    """Rank 1 refuses its last call, and ends before the others have come to it."""
    comm = commrt.init()
    goes_on(comm)
    if comm.rank == 1:
        refuse(comm)
        return []
    with pytest.raises(CommError) as raised:
        comm.allreduce(np.ones(3), **NATIVE)
    return [type(raised.value).__name__]


@pytest.mark.parametrize(("size", "where"), [(2, ""), (2, "1,1"), (3, "1,1,1")])
def test_nobody_waits_for_a_rank_that_has_left(
    mpirun: Any, size: int, where: str
) -> None:
    found = mpirun(size, leave_for_good, env=nodes(where))
    assert found[1] == []
    ends = (["RefusedError"], ["RevokedError"], ["PeerFailedError"])
    assert all(own in ends for rank, own in enumerate(found) if rank != 1), found


def lies_on_memory() -> list[bool]:
    """Ranks in place and out of place, long arrays, and a sub-communicator."""
    comm = commrt.init().dup()
    found = []
    for length in (1, 40_000, 500_000):
        for wrong in range(comm.size):
            for in_place in (True, False):
                x = np.ones(length)
                how = {**NATIVE, **({} if in_place else {"out": np.empty(length)})}
                if comm.rank == wrong:
                    refuse(comm)
                else:
                    with pytest.raises(RefusedError):
                        comm.allreduce(x, **how)
                found.append(goes_on(comm))
    comm.free()
    return found


@pytest.mark.parametrize(("size", "where"), [(2, ""), (4, "2,2"), (5, "1,3,1")])
def test_long_arrays_in_place_and_out_of_place(
    mpirun: Any, size: int, where: str
) -> None:
    found = mpirun(size, lies_on_memory, env=nodes(where))
    assert found == [[True] * 6 * size] * size
