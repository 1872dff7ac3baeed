# SPDX-License-Identifier: Apache-2.0
"""Refused calls that an MPI library runs: others make them in their place.

The library is a pretended one, which writes down what MPI would not like: calls in
another order, arrays that change before a call has ended, and calls that never end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fake_device_mpi import FakeDeviceMpi
from mpi_device_ranks import mpi_here
from refused_programs import Array, Outcomes, Step, check, draw

from commrt import algorithms
from commrt.comm import Communicator
from commrt.errors import CommError, RefusedError, RevokedError, UsageError
from commrt.local import LocalRanks

NATIVE: dict[str, Any] = {"backend": "mpi", "algorithm": "native", "nonblocking": True}


@pytest.fixture
def mpi() -> Iterator[FakeDeviceMpi]:
    with mpi_here() as fake:
        yield fake


def settle(ranks: LocalRanks) -> None:
    """Step all ranks until nothing moves."""
    idle = 0
    while idle < 70:
        moved = [ranks.step(rank) for rank in range(len(ranks.comms))]
        idle = 0 if any(moved) else idle + 1


def join(ranks: LocalRanks, comms: list[Communicator]) -> None:
    """Let communicators get one of the library's."""
    requests = [comm.barrier(**NATIVE) for comm in comms]
    settle(ranks)
    for request in requests:
        request.wait()


@contextmanager
def joined(size: int) -> Iterator[LocalRanks]:
    """Give ranks that have a communicator of the library."""
    with LocalRanks(size) as ranks:
        join(ranks, ranks.comms)
        yield ranks


def kind_of(call: Callable[[], Any]) -> str:
    """Return the class of the error that a call raises, or "right"."""
    try:
        call()
    except CommError as error:
        return type(error).__name__
    return "right"


# -- drawn programs ------------------------------------------------------------------


class Program:
    """A drawn program, on all ranks of one thread, which steps them in any order."""

    def __init__(self, ranks: LocalRanks, rng: random.Random, length: int) -> None:
        self._ranks, self._rng = ranks, rng
        size = len(ranks.comms)
        self._steps = draw(
            rng, size, length, heap=False, schedules=lambda name: self._names(name)
        )
        self._outcomes = [Outcomes(rank, size) for rank in range(size)]
        self._open: list[list[tuple[Step, Any, list[Array]]]]
        self._open = [[] for _ in range(size)]
        self._next = [0] * size
        self._most = rng.choice((1, 2, 4))
        self._eager = rng.choice((0.03, 0.3))
        self._overwritten: list[Array] = []

    def _names(self, name: str) -> list[str]:
        found = list(algorithms.names(name, len(self._ranks.comms)))
        return ["mpi/native"] * max(3, 2 * len(found)) + found

    def _start(self, rank: int) -> None:
        step = self._steps[self._next[rank]]
        self._next[rank] += 1
        used: list[Array] = []
        try:
            request = step.call(self._ranks.comms[rank], None, used, nonblocking=True)
        except (UsageError, RefusedError) as error:
            self._end(rank, step, used, _raiser(error))
        else:
            self._open[rank].append((step, request, used))

    def _end(
        self, rank: int, step: Step, used: list[Array], finish: Callable[[], Any]
    ) -> None:
        self._outcomes[rank].note(step, finish)
        for array in used:
            array.fill(-1e9)
        self._overwritten += used

    def run(self) -> None:
        """Run the program, and check what became of each call."""
        turns, ranks = 0, range(len(self._ranks.comms))
        while any(self._next[r] < len(self._steps) or self._open[r] for r in ranks):
            turns += 1
            assert turns < 300_000, (self._next, self._open)
            rank = self._rng.choice(ranks)
            if (
                self._next[rank] < len(self._steps)
                and len(self._open[rank]) < self._most
                and self._rng.random() < self._eager
            ):
                self._start(rank)
            self._ranks.step(rank)
            for entry in [e for e in self._open[rank] if e[1].done]:
                self._open[rank].remove(entry)
                step, request, used = entry
                self._end(rank, step, used, request.wait)
        check(self._steps, self._outcomes)
        settle(self._ranks)
        assert all((array == -1e9).all() for array in self._overwritten)


def _raiser(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("turn", range(40))
@pytest.mark.timeout(240)
def test_calls_of_a_library_in_flight_stay_in_step(
    mpi: FakeDeviceMpi, size: int, turn: int, seed: int
) -> None:
    rng = random.Random(f"{seed} {size} {turn}")
    mpi.set("eager", turn % 2)  # ranks are done as soon as they need nothing more
    with joined(size) as ranks:
        Program(ranks, rng, 30).run()


# -- one call ------------------------------------------------------------------------


def uneven(size: int) -> list[int]:
    return [(3 * rank + 1) % 5 for rank in range(size)]


def pair(sender: int, receiver: int) -> int:
    return (2 * sender + receiver) % 4


def call(comm: Communicator, name: str, root: int, **how: Any) -> Any:
    """Call an operation, with a result that tells its ranks' parts."""
    size, rank = comm.size, comm.rank
    counts = uneven(size)
    x = np.full(3, float(rank + 1))
    wide = np.full(3 * size, float(rank + 1))
    parts = np.full(counts[rank], float(rank + 1))
    whole = np.full(sum(counts), float(rank + 1))
    match name:
        case "bcast" | "reduce" | "gather":
            return getattr(comm, name)(x, root=root, **how)
        case "scatter":
            return comm.scatter(
                wide if rank == root else None, out=np.empty(3), root=root, **how
            )
        case "alltoall" | "reduce_scatter":
            return getattr(comm, name)(wide, **how)
        case "barrier":
            return comm.barrier(**how)
        case "allgatherv":
            return comm.allgatherv(parts, counts=counts, **how)
        case "reduce_scatterv":
            return comm.reduce_scatterv(whole, counts=counts, **how)
        case "gatherv":
            return comm.gatherv(parts, counts=counts, root=root, **how)
        case "scatterv":
            out = np.empty(counts[rank])
            return comm.scatterv(
                whole if rank == root else None,
                out=out,
                counts=counts,
                root=root,
                **how,
            )
        case "alltoallv":
            sends = [pair(rank, to) for to in range(size)]
            receives = [pair(source, rank) for source in range(size)]
            return comm.alltoallv(
                np.full(sum(sends), float(rank + 1)),
                send_counts=sends,
                recv_counts=receives,
                **how,
            )
    return getattr(comm, name)(x, **how)


ALL = (
    *("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "alltoall"),
    *("gather", "scatter", "barrier", "scan", "exscan", "allgatherv", "alltoallv"),
    *("gatherv", "scatterv", "reduce_scatterv"),
)


def refuse(comm: Communicator) -> None:
    """Make a call that is refused, in the place of any other."""
    with pytest.raises(UsageError):
        comm.barrier(timeout_s=-1)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.timeout(240)
def test_each_collective_is_made_in_its_place(
    mpi: FakeDeviceMpi, name: str, size: int, is_eager: bool, seed: int
) -> None:
    """Any set of ranks refuses, before or after the others have begun the call.

    ``is_eager``: those that need nothing more are done before they hear of that.
    """
    rng = random.Random(f"{seed} {name} {size}")
    mpi.set("eager", is_eager)
    with joined(size) as ranks:
        for turn in range(12):
            root = turn % size
            wrong = rng.sample(range(size), rng.choice((1, 1, 2, size)) if turn else 1)
            order = rng.sample(range(size), size)
            requests: dict[int, Any] = {}
            for rank in order:
                if rank in wrong:
                    refuse(ranks.comms[rank])
                else:
                    requests[rank] = call(ranks.comms[rank], name, root, **NATIVE)
                if rng.random() < 0.3:
                    ranks.step(rng.randrange(size))
            settle(ranks)
            found = {kind_of(request.wait) for request in requests.values()}
            assert found <= {"RefusedError", "right"}, (turn, wrong, order)
            requests = {r: call(ranks.comms[r], name, root, **NATIVE) for r in order}
            settle(ranks)
            results = [requests[rank].wait() for rank in range(size)]
            again = [call(comm, name, root, nonblocking=True) for comm in ranks.comms]
            settle(ranks)
            for mine, theirs in zip(results, again, strict=True):
                expected = theirs.wait()
                if expected is not None:
                    np.testing.assert_array_equal(mine, expected)


def test_nobody_takes_a_stand_in_for_a_result(mpi: FakeDeviceMpi) -> None:
    """The library is done with the call, and those that were in it still raise."""
    with joined(3) as ranks:
        xs = [np.full(4, 2.0) for _ in ranks.comms]
        requests = [ranks.comms[r].allreduce(xs[r], **NATIVE) for r in (0, 2)]
        refuse(ranks.comms[1])
        settle(ranks)
        assert mpi.outstanding() == 0
        said = "rank 1 has refused its call, and nothing was delivered: barrier: time"
        for request in requests:
            with pytest.raises(RefusedError, match=said):
                request.wait()


def test_a_rank_that_has_not_begun_gives_the_library_nothing(
    mpi: FakeDeviceMpi,
) -> None:
    """Where nobody has begun the call, nobody makes it."""
    with joined(3) as ranks:
        before = mpi.counter("MPI_Iallreduce")
        refuse(ranks.comms[1])
        for rank in (0, 2):
            with pytest.raises(RefusedError):
                ranks.comms[rank].allreduce(np.ones(1), **NATIVE).wait()
        settle(ranks)
        assert mpi.counter("MPI_Iallreduce") == before


def test_the_root_of_many_calls_is_ahead(mpi: FakeDeviceMpi) -> None:
    mpi.set("eager", 1)
    with joined(2) as ranks:
        root, late = ranks.comms
        values = [np.full(3, float(turn)) for turn in range(200)]
        sent = [root.bcast(x.copy(), root=0, **NATIVE) for x in values]
        settle(ranks)
        for turn, x in enumerate(values):
            if turn == 20:
                refuse(late)
                continue
            request = late.bcast(np.zeros(3), root=0, **NATIVE)
            settle(ranks)
            assert (request.wait() == x).all()
        assert "right" in {kind_of(request.wait) for request in sent}


def test_a_call_that_nobody_remembers_ends_the_communicator(
    mpi: FakeDeviceMpi,
) -> None:
    """The root is more calls ahead than it remembers."""
    mpi.set("eager", 1)
    with joined(2) as ranks:
        root, late = ranks.comms
        sent = [root.bcast(np.ones(3), root=0, **NATIVE) for _ in range(300)]
        settle(ranks)
        for request in sent:
            request.wait()
        refuse(late)
        settle(ranks)
        found = kind_of(lambda: late.bcast(np.zeros(3), root=0, **NATIVE).wait())
        assert found == "RevokedError"


def test_a_rank_that_frees_it_ends_it_for_those_who_wait() -> None:
    with mpi_here(is_clean=False), joined(3) as ranks:
        pairs = ranks.each(lambda comm: comm.dup())
        join(ranks, pairs)
        request = pairs[0].allreduce(np.ones(2), **NATIVE)
        refuse(pairs[1])
        pairs[1].free()
        settle(ranks)
        with pytest.raises(RevokedError):
            request.wait(timeout_s=240)
