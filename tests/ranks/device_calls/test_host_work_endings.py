# SPDX-License-Identifier: Apache-2.0
"""Calls whose work is the host's, where it does not come to its end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

from commrt.comm import core_of
from commrt.device_calls.host_thread import _close, _Feed
from commrt.errors import CommError
from commrt.group.deferred_release import release_finished

LIMIT_S = 300.0


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        os.sched_yield()


def warm(rank: Rank) -> tuple[Any, Any]:
    """Return a communicator whose ranks have met for compressed calls, and an array."""
    comm = rank.comm.dup()
    x = rank.array(np.ones(8, "f4"))
    comm.allreduce(x, compress="float16")
    rank.stream.synchronize()
    return comm, x


def started(comm: Any, x: Any) -> Any:
    return comm.allreduce(x, compress="float16", nonblocking=True, timeout_s=300)


def at_work(comm: Any, x: Any) -> Any:
    """Return the request of a call that this rank's host works on."""
    request = started(comm, x)
    until(lambda: request._job._request is not None)
    return request


def test_a_call_that_was_given_up_while_the_host_worked_keeps_no_memory() -> None:
    def main(rank: Rank) -> None:
        lost, x = warm(rank)
        if rank.rank == 0:
            request = at_work(lost, x)
            request._job.work.give_up("it was told to")
            until(lambda: request._job.is_over)
            with pytest.raises(CommError, match="it was told to"):
                request.synchronize()
        rank.comm.barrier()
        core_of(lost).give_up("it was told to")
        lost.free()

        def is_back() -> bool:
            release_finished(core_of(rank.comm).world)
            return not core_of(rank.comm).world.deferred

        until(is_back)

    on_threads(2, main)


@pytest.mark.parametrize("ends", ["revoke", "give_up"])
def test_a_rank_that_ends_all_before_its_first_host_work_is_heard(ends: str) -> None:
    waits = threading.Event()

    def main(rank: Rank) -> None:
        comm = rank.comm.dup()
        if rank.rank == 0:
            request = started(comm, rank.array(np.ones(8, "f4")))
            until(lambda: request._job._request is not None)
            waits.set()
            with pytest.raises(CommError, match="it was told to"):
                request.synchronize()
        else:
            until(waits.is_set)
            assert core_of(comm).devices.host_jobs._channel is None
            getattr(comm if ends == "revoke" else core_of(comm), ends)("it was told to")
        rank.comm.barrier()
        comm.free()

    on_threads(2, main)


def test_work_that_cannot_even_fail_does_not_stop_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refuses:
        """As the work on a device that is gone."""

        def __init__(self, work: Any) -> None:
            self._work = work

        def fail(self, *_: Any) -> None:
            raise RuntimeError("the device is gone")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._work, name)

    def main(rank: Rank) -> None:
        lost, x = warm(rank)
        if rank.rank == 0:
            request = at_work(lost, x)
            request._job.work = Refuses(request._job.work)
            later = started(lost, x)
            request._job._channel.give_up("it was told to")
            until(lambda: request._job.is_over and later._job.is_over)
            assert "gave up" in str(request.own_error)
            [thread] = core_of(lost).devices.host_jobs._threads
            assert thread.is_alive()
            later.be_quiet()
            request.be_quiet()
        core_of(lost).give_up("enough")
        lost.free()

    on_threads(2, main)


def test_what_waits_behind_other_work_learns_that_its_communicator_was_freed() -> None:
    def main(rank: Rank) -> None:
        lost, _ = warm(rank)
        x = rank.array(np.array([1], np.int32)), rank.array(np.ones(1, "f4")), (9,)
        lost.sparse_allreduce(x, result="sparse")
        requests = []
        if rank.rank == 0:
            for _ in range(3):
                made = lost.sparse_allreduce(x, result="sparse", nonblocking=True)
                requests.append(made)
            until(lambda: requests[0]._job._request is not None)
            core_of(lost).devices.host_jobs._feed.closed = True
            until(lambda: not core_of(lost).devices.host_jobs._threads[0].is_alive())
        core_of(lost).give_up("it was told to")
        lost.free()
        for request in requests:
            assert request._job.is_over
            with pytest.raises(CommError):
                request.wait(timeout_s=LIMIT_S)

    on_threads(2, main)


def test_a_forked_process_waits_for_no_lock_of_its_parents_threads() -> None:
    feed = _Feed()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with feed.changed:
            held.set()
            done.wait(LIMIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(LIMIT_S)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(int(LIMIT_S))
            _close(feed, [])
            os._exit(0)
        finally:
            os._exit(1)
    done.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
