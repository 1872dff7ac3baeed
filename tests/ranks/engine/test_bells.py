# SPDX-License-Identifier: Apache-2.0
"""A rank that waits for long sleeps, and what it waits for wakes it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import commrt
from commrt import _native
from commrt.comm import Communicator, core_of
from commrt.errors import RevokedError
from commrt.local import LocalRanks, run

_DEADLINE_S = 300.0
_LONG = 1 << 18

Part = Callable[[Communicator], Any]


def until(is_so: Callable[[], bool], what: str) -> None:
    """Look until something is so, which another thread brings about."""
    deadline = time.monotonic() + _DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        os.sched_yield()


def until_asleep(comm: Communicator, rank: int) -> _native.Bells:
    """Return the bells once a rank sleeps."""
    assert core_of(comm).world.bells is not None
    bells = core_of(comm).world.bells.native
    bells.ring(rank)  # the bit may still be set from a wait that is over
    until(lambda: bells.is_asleep(rank), f"rank {rank} does not sleep")
    return bells


def both(call: Part) -> tuple[Part, Part]:
    """Return what rank 0 and rank 1 do where both make the same call."""
    return call, call


def many_broadcasts(comm: Communicator) -> None:
    """Use up all lines, so that the root waits for the other rank to take some."""
    requests = [comm.bcast(np.ones(1), nonblocking=True) for _ in range(200)]
    for request in requests:
        request.wait()


def fused(comm: Communicator) -> None:
    """Run one bucket."""
    with comm.fused():
        requests = [comm.allreduce(np.ones(9), nonblocking=True) for _ in range(3)]
        for request in requests:
            request.wait()


WAITS: dict[str, tuple[Part, Part]] = {
    "allreduce": both(lambda comm: comm.allreduce(np.ones(1))),
    "allreduce in lines": both(lambda comm: comm.allreduce(np.ones(200))),
    "allreduce in slots": both(lambda comm: comm.allreduce(np.ones(2000))),
    "allreduce in fragments": both(lambda comm: comm.allreduce(np.ones(_LONG))),
    "barrier": both(lambda comm: comm.barrier()),
    "wait": both(lambda comm: comm.allreduce(np.ones(1), nonblocking=True).wait()),
    "recv": (
        lambda comm: comm.recv(np.ones(1), source=1),
        lambda comm: comm.send(np.ones(1), dest=0),
    ),
    "long recv": (
        lambda comm: comm.recv(np.ones(_LONG), source=1),
        lambda comm: comm.send(np.ones(_LONG), dest=0),
    ),
    "long send": (
        lambda comm: comm.send(np.ones(_LONG), dest=1),
        lambda comm: comm.recv(np.ones(_LONG), source=0),
    ),
    "acknowledgements": both(many_broadcasts),
    "room for packets": (
        lambda comm: [comm.send(np.ones(2000), dest=1) for _ in range(300)],
        lambda comm: [comm.recv(np.ones(2000), source=0) for _ in range(300)],
    ),
    "fused": both(fused),
    "sparse": both(
        lambda comm: comm.sparse_allreduce(
            commrt.SparseVector(np.arange(5), np.ones(5), (100,))
        )
    ),
    "a function": both(
        lambda comm: comm.allreduce(
            np.ones(3), op=commrt.reduction(lambda a, b: a + b, commutative=True)
        )
    ),
    "multi_sendrecv": both(
        lambda comm: comm.multi_sendrecv(
            sends=[(np.ones(3), 1 - comm.rank)], recvs=[(np.ones(3), 1 - comm.rank)]
        )
    ),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_waits_sleeps_until_it_is_woken(what: str) -> None:
    """The other rank's call rings: it does not leave that to the end of a sleep."""

    def rank_main(comm: Communicator) -> None:
        part = WAITS[what][comm.rank]
        part(comm)  # what is made once is there then
        comm.barrier()
        if comm.rank == 1:
            bells = until_asleep(comm, 0)
            part(comm)
            until(lambda: not bells.is_asleep(0), "nobody rang")
        else:
            part(comm)

    run(2, rank_main, timeout_s=_DEADLINE_S)


def test_a_rank_whose_array_is_read_sleeps_until_it_has_been() -> None:
    def rank_main(comm: Communicator) -> None:
        shown = comm.empty(_LONG, np.float64)
        if comm.rank == 1:
            bells = until_asleep(comm, 0)
            comm.bcast(shown)
            until(lambda: not bells.is_asleep(0), "nobody rang")
        else:
            comm.bcast(shown)

    run(2, rank_main, timeout_s=_DEADLINE_S)


def test_a_rank_that_gives_up_wakes_the_others() -> None:
    looked = threading.Event()

    def rank_main(comm: Communicator) -> None:
        if comm.rank == 1:
            bells = until_asleep(comm, 0)
            core_of(comm).give_up("it has had enough")
            assert not bells.is_asleep(0)
            looked.set()
        else:
            with pytest.raises(RevokedError, match="gave up"):
                comm.allreduce(np.ones(1))
            looked.wait(_DEADLINE_S)  # else it may sleep in another wait, its end

    run(2, rank_main, timeout_s=_DEADLINE_S)


def test_ranks_that_others_work_without_are_not_woken() -> None:
    """Rank 2 sleeps while the others exchange; its bell rings at its own message."""

    def rank_main(comm: Communicator) -> None:
        pair = comm.split(color=comm.rank // 2)
        if comm.rank == 2:
            comm.recv(np.ones(1), source=1)
            return
        bells = until_asleep(comm, 2)
        for _ in range(50):
            pair.allreduce(np.ones(4))
            pair.allreduce(np.ones(4000))
            pair.sendrecv(
                np.ones(1), dest=1 - comm.rank, out=np.ones(1), source=1 - comm.rank
            )
        assert bells.is_asleep(2)
        pair.barrier()
        if comm.rank == 1:
            comm.send(np.ones(1), dest=2)

    run(3, rank_main, timeout_s=_DEADLINE_S)


def test_the_progress_thread_sleeps_and_is_woken() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        engine = core_of(first).world.engine
        engine.start_thread()
        try:
            x = np.ones(_LONG)
            request = first.allreduce(x, nonblocking=True)
            bells = until_asleep(first, 0)
            other = second.allreduce(np.ones(_LONG), nonblocking=True)

            def have_ended() -> bool:
                ranks.step(1)
                return bool(request.done and other.done)

            until(have_ended, "the thread does nothing")
            assert not bells.is_asleep(0)
            assert request.wait() is x
            other.wait()
        finally:
            engine.stop_thread()


def stepping(comm: Communicator) -> Callable[[], None]:
    """Let a thread make progress beside the caller's; the result ends it."""
    over = threading.Event()

    def main() -> None:
        backoff = _native.Backoff(core_of(comm).world.engine)
        while not over.is_set():
            if not core_of(comm).world.engine.step():
                backoff.pause(0.01)

    thread = threading.Thread(target=main)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


def test_another_thread_of_the_rank_wakes_who_waits() -> None:
    """A message that one thread takes in may be what another one sleeps for."""

    def rank_main(comm: Communicator) -> None:
        if comm.rank == 1:
            bells = until_asleep(comm, 0)
            comm.send(np.ones(1), dest=0)
            assert not bells.is_asleep(0)
            return
        helper = stepping(comm)
        comm.recv(np.ones(1), source=1)
        helper()

    run(2, rank_main, timeout_s=_DEADLINE_S)


def test_a_bell_counts_its_sleepers() -> None:
    """Only a bell whose bit is set is rung, and it is rung once."""
    first = _native.bells_of_threads("test/bells", 2, 0)
    second = _native.bells_of_threads("test/bells", 2, 1)
    engine = _native.Engine()
    engine.add_bells(second)
    assert [bells.name for bells in engine.bells] == ["test/bells"]
    assert not first.is_asleep(1)
    first.ring(1)
    backoff = _native.Backoff(engine)
    backoff.rest(1.0)  # lies down, for another look
    assert first.is_asleep(1)
    first.ring(1)
    assert not first.is_asleep(1)
    backoff.rest(1.0)  # notices it, for another look
    assert not first.is_asleep(1)
    backoff.rest(1.0)  # lies down again
    assert first.is_asleep(1)
    backoff.rest(0.001)  # sleeps for so long
    assert first.is_asleep(1)
    assert not first.is_asleep(0)


def test_a_world_of_the_same_ranks_has_the_same_bells() -> None:
    """A process sleeps by one bell, however many worlds it is in."""
    engine = _native.Engine()
    mine = _native.bells_of_threads("test/worlds", 1, 0)
    engine.add_bells(mine)
    engine.add_bells(_native.bells_of_threads("test/gone", 1, 0))
    assert [bells.name for bells in engine.bells] == ["test/worlds"]
