# SPDX-License-Identifier: Apache-2.0
"""Ranks of MPI go on after a fault in which nobody has died: revoke, agree, shrink.

No launcher has to be told of it, and no function of MPI that blocks is called.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi_ranks import MpiRun

import commrt
from commrt.bootstrap import connect
from commrt.comm import Communicator, core_of
from commrt.errors import RevokedError, TimeoutError_
from commrt.launch.detect import detect

NATIVE = {"backend": "mpi", "algorithm": "native"}


def sum_of(comm: Communicator, **how: Any) -> float:
    return float(comm.allreduce(np.array([2.0**comm.rank]), **how)[0])


def until_it_fails(comm: Communicator) -> None:
    while True:
        comm.allreduce(np.ones(3))


def a_rank_is_late(turns: int) -> list[Any]:
    """Rank 0 comes only when the others have given up; then all go on; ``turns``."""
    comm = commrt.init()
    others = [*range(1, comm.size)]
    said: list[Any] = []
    for turn in range(turns):
        world = core_of(comm).world
        if comm.rank != 0:
            with pytest.raises((TimeoutError_, RevokedError)):
                comm.allreduce(np.ones(3), timeout_s=0.2)
            comm.revoke("a rank is late")
            for _ in range(2):
                with pytest.raises(TimeoutError_, match=r"ranks? 0\b.* neither came"):
                    comm.shrink(timeout_s=0.05)
            with pytest.raises(TimeoutError_, match=r"ranks? 0\b.* neither came"):
                comm.agree(timeout_s=0.05)
            world.meet(others, f"have given up {turn}")
        if comm.rank < 2:  # beside the communicator, which has failed
            world.meet([0, 1], f"rank 0 may come {turn}")
        if comm.rank == 0:
            with pytest.raises(RevokedError):
                until_it_fails(comm)
        comm, old = comm.shrink(), comm
        old.free()
        said = [comm.rank, sum_of(comm), sum_of(comm, **NATIVE)]
        part = comm.split(comm.rank % 2)
        assert part is not None
        said.append(sum_of(part))
    return [*said, comm.agree(-1 ^ 1 << comm.rank) ^ -1]


@pytest.mark.parametrize(
    ("size", "nodes", "turns"), [(2, "1", 1), (3, "3", 2), (3, "2,1", 1), (5, "1", 1)]
)
def test_a_timeout_with_nobody_dead_is_recovered_from(
    mpirun: MpiRun, size: int, nodes: str, turns: int
) -> None:
    said = mpirun(size, a_rank_is_late, env={"COMMRT_NODES": nodes}, turns=turns)
    total = 2.0**size - 1
    assert said == [
        [
            rank,
            total,
            total,
            2.0 ** len(range(rank % 2, size, 2)) - 1,
            (1 << size) - 1,
        ]
        for rank in range(size)
    ]


def parts_go_on() -> list[float]:
    """One half of the ranks founds itself anew, again and again; the rest works on.

    New communicators and old ones send on the same MPI communicator meanwhile.
    """
    comm = commrt.init()
    part = comm.split(comm.rank % 2)
    assert part is not None
    sums = []
    for _ in range(3):
        if comm.rank % 2:
            part.revoke()
            part = part.shrink()
        sums += [sum_of(part), sum_of(comm), sum_of(part.dup()), sum_of(comm.dup())]
    return sums


@pytest.mark.parametrize(("size", "nodes"), [(5, "1"), (5, "2,3"), (3, "3")])
def test_a_part_founds_itself_anew(mpirun: MpiRun, size: int, nodes: str) -> None:
    said = mpirun(size, parts_go_on, env={"COMMRT_NODES": nodes})
    for rank, sums in enumerate(said):
        part = 2.0 ** len(range(rank % 2, size, 2)) - 1
        assert sums == [part, 2.0**size - 1] * 6


def regroup_and_meet() -> list[Any]:
    """The keys of both worlds are the same."""
    peers = connect(detect())
    members = [*range(peers.size)][::-1]
    made, said = peers.regroup(members, "k", bytes([peers.rank]), 60)
    some = [rank for rank in range(made.size) if rank != 1]
    mine = [made.rank, made.size, {rank: [*blob] for rank, blob in said.items()}]
    for _ in range(3):
        both = peers.exchange(range(peers.size), "x", b"old", 60)
        both += made.exchange(range(made.size), "x", b"new", 60)
    mine.append(sorted({blob.decode() for blob in both}))
    if made.rank == 1:
        return mine
    last, said = made.regroup(some, "k", b"", 60)
    mine.append([*last.exchange(range(last.size), "x", bytes([last.rank]), 60)[-1]])
    last.close()
    made.close()
    return mine


def test_worlds_of_one_mpi_communicator_are_told_apart(mpirun: MpiRun) -> None:
    said = mpirun(4, regroup_and_meet)
    blobs = {str(rank): [rank] for rank in (3, 2, 1, 0)}
    for rank, mine in enumerate(said):
        expected = [3 - rank, 4, blobs, ["new", "old"]]
        assert mine == (expected if rank == 2 else [*expected, [2]])


def what_it_survives() -> list[Any]:
    from commrt.mpi import library, ulfm

    found = ulfm.survival()
    comm = commrt.init()
    return [found.can, found.why, library.library_name(library.load()), comm.size]


def test_what_it_takes_to_survive_a_death_is_said(mpirun: MpiRun) -> None:
    for can, why, library, size in mpirun(2, what_it_survives):
        assert (can, size) == (False, 2)
        assert "mpiexec --with-ft ulfm" in why
        assert library.startswith("Open MPI") or library in why


def mpi_of_the_program() -> list[int]:
    """``comm.mpi`` of a communicator that has replaced another is one of its ranks."""
    comm = commrt.init()
    comm.revoke()
    made = comm.shrink()
    assert made.mpi is not None
    return [made.mpi.Get_rank(), made.mpi.allreduce(1)]


def test_the_program_gets_an_mpi_communicator_of_the_new_world(mpirun: MpiRun) -> None:
    assert mpirun(3, mpi_of_the_program) == [[rank, 3] for rank in range(3)]
