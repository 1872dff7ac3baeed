# SPDX-License-Identifier: Apache-2.0
"""Ranks of MPI are killed, and the others go on: ``mpiexec --with-ft ulfm``.

The deadline of calls is far away (600 s), so each test ends by the notice of a death or
not at all. Each job has to end with status 0: nobody hangs in MPI_Finalize.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi_ranks import MpiRun

import commrt
import commrt.founding
from commrt.bootstrap.ballots import Voter
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.comm import Communicator, core_of
from commrt.errors import (
    BackendError,
    CommError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
)

FAILED = (PeerFailedError, RevokedError)
NOTICE = re.compile(r"rank 1\b.*process \d+ on \S+ has (ended|failed)")
NATIVE = {"backend": "mpi", "algorithm": "native"}
ON_ONE_NODE, ON_NODES_OF_ONE, ON_TWO_NODES = "3", "1", "2,1"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sum_of(comm: Communicator, **how: Any) -> float:
    return float(comm.allreduce(np.array([2.0**comm.rank]), **how)[0])


def until_it_fails(comm: Communicator, length: int = 1000) -> CommError:
    while True:
        try:
            comm.allreduce(np.ones(length))
        except FAILED as error:
            return error


def calls_that_wait(comm: Communicator, dies: int) -> dict[str, Callable[[], Any]]:
    """Return calls, each on a communicator of its own, that need the rank that dies."""
    small, large = np.ones(5), np.ones(300_001)

    def apart(call: Callable[[Communicator], Any]) -> Callable[[], Any]:
        mine = comm.dup()
        mine.allreduce(small.copy())
        return lambda: call(mine)

    found = {
        "allreduce": apart(lambda c: c.allreduce(small.copy())),
        "long allreduce": apart(lambda c: c.allreduce(large.copy())),
        "nonblocking": apart(lambda c: c.allreduce(small, nonblocking=True).wait()),
        "alltoallv": apart(
            lambda c: c.alltoallv(np.ones(c.size), send_counts=[1] * c.size)
        ),
        "recv": apart(lambda c: c.recv(np.empty(3), source=dies)),
        "recv from anyone": apart(lambda c: c.recv(np.empty(3))),
        "long send": apart(lambda c: c.send(large, dest=dies)),
        "probe": apart(lambda c: c.probe(dies)),
        "split": apart(lambda c: c.split(0)),
        "empty": apart(lambda c: c.empty(100)),
        "object": apart(lambda c: c.allgather_object([c.rank])),
    }
    mpi = comm.dup()
    mpi.allreduce(small.copy(), **NATIVE)
    found["mpi/native"] = lambda: mpi.allreduce(small.copy(), **NATIVE)
    return found


def killed_while_all_wait(dies: int) -> dict[str, list[str]]:
    """Each call waits in a thread of its own when the rank dies."""
    comm = commrt.init()
    others = [rank for rank in range(comm.size) if rank != dies]
    calls = calls_that_wait(comm, dies)
    if comm.rank == dies:
        for rank in others:
            comm.recv(np.empty(1), source=rank, tag=5)
        die()
    said: dict[str, list[str]] = {}
    started = threading.Barrier(len(calls) + 1)

    def make(name: str) -> None:
        started.wait()
        try:
            calls[name]()
            said[name] = ["none", ""]
        except CommError as error:
            said[name] = [type(error).__name__, str(error)]

    threads = [threading.Thread(target=make, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    started.wait()
    comm.send(np.ones(1), dest=dies, tag=5)
    for thread in threads:
        thread.join()
    for later in range(2):
        with pytest.raises(FAILED) as caught:
            comm.allreduce(np.ones(3))
        said[f"later {later}"] = [type(caught.value).__name__, str(caught.value)]
    return said


@pytest.mark.parametrize("nodes", [ON_ONE_NODE, ON_NODES_OF_ONE, ON_TWO_NODES])
def test_every_wait_names_a_rank_that_was_killed(ulfm: MpiRun, nodes: str) -> None:
    said = ulfm.survivors(3, killed_while_all_wait, env={"COMMRT_NODES": nodes}, dies=1)
    assert sorted(said) == [0, 2]
    for rank in said.values():
        if nodes != ON_ONE_NODE:
            del rank["empty"]  # of one node's ranks, not all with a dead one
        for name, (kind, text) in rank.items():
            assert kind == "PeerFailedError", (name, kind, text)
            assert NOTICE.search(text), (name, text)


def goes_on(dies: list[int]) -> list[Any]:
    comm = commrt.init()
    sum_of(comm)
    if comm.rank in dies:
        die()
    error = until_it_fails(comm)
    flag = comm.agree(1 << comm.rank | 64)
    made = comm.shrink()
    comm.free()
    named = [rank for rank in dies if f"rank {rank} has died" in str(error)]
    part = made.split(made.rank % 2)
    assert part is not None
    native = {} if made.size == 1 else NATIVE
    sums = [sum_of(made), sum_of(made, **native)]
    return [made.rank, *sums, sum_of(part), flag, bool(named)]


@pytest.mark.parametrize(
    ("size", "nodes", "dies"),
    [
        (2, "1", [0]),
        (3, "1", [1]),
        (3, "3", [0]),
        (5, "2,3", [0, 3]),
        (5, "2,2,1", [1, 2]),
    ],
)
def test_the_others_go_on(ulfm: MpiRun, size: int, nodes: str, dies: list[int]) -> None:
    left = [rank for rank in range(size) if rank not in dies]
    said = ulfm.survivors(size, goes_on, env={"COMMRT_NODES": nodes}, dies=dies)
    total = 2.0 ** len(left) - 1
    flag = 64 if len(left) > 1 else 64 | 1 << left[0]
    assert said == {
        rank: [
            number,
            total,
            total,
            2.0 ** len(range(number % 2, len(left), 2)) - 1,
            flag,
            True,
        ]
        for number, rank in enumerate(left)
    }


def one_after_the_other() -> list[float]:
    comm = commrt.init()
    first = comm.rank
    sums = [sum_of(comm)]
    for turn in range(comm.size - 1):
        if turn == first:
            die()
        until_it_fails(comm)
        comm = comm.shrink()
        sums.append(sum_of(comm))
    return sums


def test_ranks_die_until_one_is_left(ulfm: MpiRun) -> None:
    said = ulfm.survivors(4, one_after_the_other, env={"COMMRT_NODES": "1"})
    assert said == {3: [15.0, 7.0, 3.0, 1.0]}


def dies_in_shrink(where: str) -> list[float]:
    """Rank 1 is dead, and rank 2 dies while the others found their world."""
    comm = commrt.init()
    if comm.rank == 1:
        die()
    until_it_fails(comm)
    if comm.rank == 2:
        if where == "after its vote":
            vote = Voter.come
            Voter.come = lambda self, blob: (vote(self, blob), die())  # type: ignore[assignment, method-assign, func-returns-value]
        elif where == "before MPI's shrink":
            MpiBootstrap.renewed = lambda self, timeout_s: die()  # type: ignore[assignment, method-assign, func-returns-value]
        elif where == "as the world connects":
            commrt.founding.connect_world = lambda *args, **kwargs: die()  # type: ignore[attr-defined]
    made = comm.shrink()
    return [made.size, sum_of(made)]


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize(
    "where", ["after its vote", "before MPI's shrink", "as the world connects"]
)
def test_a_death_during_shrink(ulfm: MpiRun, where: str, nodes: str) -> None:
    env = {"COMMRT_NODES": nodes}
    said = ulfm.survivors(4, dies_in_shrink, env=env, where=where)
    assert said == {0: [2, 3.0], 3: [2, 3.0]}


def late_and_not_dead() -> list[Any]:
    """Rank 1 is stopped; the others give up; then all go on, rank 1 too."""
    comm = commrt.init()
    pids = comm.allgather_object(os.getpid())
    said: list[Any] = []
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        assert isinstance(until_it_fails(comm, 3), RevokedError)
    else:
        with pytest.raises((TimeoutError_, RevokedError)):  # or by the other one
            comm.allreduce(np.ones(3), timeout_s=1.0)
        comm.revoke("a rank is late")
        with pytest.raises(TimeoutError_) as caught:
            comm.shrink(timeout_s=0.5)
        said.append("rank 1 neither came nor ended" in str(caught.value))
        core_of(comm).world.meet([0, 2], "both have given up")
        if comm.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
    made = comm.shrink()
    return [*said, made.size, sum_of(made)]


@pytest.mark.parametrize("nodes", ["3", "1"])
def test_a_stopped_rank_is_late_and_not_dead(ulfm: MpiRun, nodes: str) -> None:
    said = ulfm.survivors(3, late_and_not_dead, env={"COMMRT_NODES": nodes})
    assert said == {0: [True, 3, 7.0], 1: [3, 7.0], 2: [True, 3, 7.0]}


def parts_go_on() -> list[Any]:
    """Rank 1 dies; communicators without it go on, and others are made."""
    comm = commrt.init()
    part = comm.split(comm.rank // 2)
    assert part is not None
    if comm.rank == 1:
        for source in (2, 3):  # they have left split()
            comm.recv(np.empty(1), source=source)
        die()
    if comm.rank > 1:
        comm.send(np.ones(1), dest=1)
    said: list[Any] = []
    if comm.rank == 0:
        until_it_fails(part)
        alone = part.shrink()
        said.append([alone.size, sum_of(alone)])
    else:
        said.append([part.size, sum_of(part)])
    until_it_fails(comm)
    some = comm.create_group([3, 2, 0])
    said.append(sum_of(some))
    with pytest.raises(BackendError, match="a rank of the job has died"):
        sum_of(some, **NATIVE)
    said.append(sum_of(some.dup()))
    made = comm.shrink()
    said.append([sum_of(made), sum_of(made, **NATIVE)])
    return said


@pytest.mark.parametrize("nodes", ["4", "1", "2"])
def test_communicators_without_the_rank_go_on(ulfm: MpiRun, nodes: str) -> None:
    said = ulfm.survivors(4, parts_go_on, env={"COMMRT_NODES": nodes})
    rest = [7.0, 7.0, [7.0, 7.0]]
    assert said == {
        0: [[1, 1.0], *rest],
        2: [[2, 3.0], *rest],
        3: [[2, 3.0], *rest],
    }
