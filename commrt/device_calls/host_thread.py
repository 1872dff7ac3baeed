# SPDX-License-Identifier: Apache-2.0
"""A thread for the host's parts of calls on device arrays.

The engine's progress thread runs no Python, and sparse sums and compression are steps
of Python. So each communicator that makes such calls has a thread for them, which
sleeps while there are none, waits without the interpreter's lock, and works in the
order of the calls: one after the other, so on all ranks alike. It talks to the other
ranks on a communicator of its own, whose calls meet no others. Where no thread runs
(``COMMRT_PROGRESS=off``, simulated devices), ``test()`` and ``synchronize()`` do it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from commrt import _native, env
from commrt.devices.arrays import freeing_nothing
from commrt.errors import (
    CommError,
    DeviceError,
    MismatchError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.group.compare import Refusing
from commrt.group.group import Group
from commrt.group.stepped import SteppedRequest
from commrt.vocabulary.limits import deadline_after

__all__ = ["HostChannel", "HostJob", "HostJobs", "RefusedOnHost"]

_SLICE_S = 0.05
"""A thread that waits looks so often whether it shall end."""
_END_S = 1.0
_NAP_S = 50e-6


class HostChannel(Protocol):
    """Runs the host's parts of calls: collectives, compressed ones, sparse sums."""

    def carrier_of(self, service: str | None) -> Refusing:
        """Return what calls of a service begin on."""

    @property
    def sparse_allreduce(self) -> Callable[..., Any]:
        """The communicator's method of this name, for the host."""

    @property
    def topk_allreduce(self) -> Callable[..., Any]:
        """The communicator's method of this name, for the host."""

    def check_usable(self) -> None:
        """Raise ClosedError or RevokedError where it cannot be used."""

    def give_up(self, why: str) -> None:
        """Make it unusable, here and for ranks of this node that wait."""

    def end_on_all_ranks(self, why: str) -> None:
        """End all operations in flight and all later ones, on all ranks."""

    def free(self) -> None:
        """Release it; local, idempotent."""


class HostJob:
    """The host's part of one call."""

    def __init__(
        self,
        channel: HostChannel,
        device: Any,
        work: _native.HostWork,
        call: _native.DeviceCall,
        what: str,
        begin: Callable[[Sequence[int]], SteppedRequest],
        timeout_s: float,
    ) -> None:
        """``begin`` starts it, given where the call's arrays lie in pinned memory."""
        self.what = what
        self.device, self.work, self.call = device, work, call
        self.found: Any = None
        """The value that the host's call returned."""
        self.error: BaseException | None = None
        self.over = threading.Event()
        self._channel = channel
        self._begin: Callable[[Sequence[int]], SteppedRequest] | None = begin
        self._request: SteppedRequest | None = None
        self._timeout_s = timeout_s
        self._deadline = 0.0

    def advance(self, *, blocks: bool) -> bool:
        """Do all work that is possible by now; True if there was any.

        With ``blocks`` it waits for a slice of time, without the interpreter's lock.
        """
        try:
            if self._request is None:
                return self._start(blocks)
            moved = self._go_on(self._request, blocks)
            if not moved:
                self._check_time()
            return moved
        except Exception as error:  # noqa: BLE001  raised by the call's request
            self._fail(error)
            return True

    def _start(self, blocks: bool) -> bool:
        if blocks:
            come = self.work.wait_until_come(self.call, _SLICE_S)
        else:
            come = self.work.has_come(self.call)
        if not come:
            return False
        if self.call.failure is not None:  # before: the others must not wait for it
            self.give_up(f"{self.what} failed: {self.call.failure[1]}")
            return True
        assert self._begin is not None
        self._deadline = deadline_after(self._timeout_s)
        self._request = self._begin(self.work.places(self.call))
        self.work.announce()
        return True

    def _go_on(self, request: SteppedRequest, blocks: bool) -> bool:
        before = request.num_steps
        is_done = request.advance_for(_SLICE_S) if blocks else request.test()
        if not is_done:
            if request.num_steps == before:
                return False
            self.work.announce()  # messages have left
            return True
        self.found = request.wait()
        self.work.done(self.call)
        self._end()
        return True

    def _check_time(self) -> None:
        if self._request is None or self.over.is_set():
            return
        if self.call.failure is not None:
            self.give_up(f"{self.what} failed: {self.call.failure[1]}")
        elif time.monotonic() > self._deadline:
            self._fail(
                TimeoutError_(
                    f"{self.what}: not complete within {self._timeout_s:g} s from when "
                    f"its arrays were on the host; its streams were let go, and its "
                    f"output is worth nothing: {self._request!r}"
                )
            )

    def _fail(self, error: BaseException) -> None:
        self.error = error
        # A device that is gone may refuse; what came first is told, and the jobs go on.
        is_known = isinstance(error, MismatchError) or getattr(error, "is_told", False)
        if not is_known:
            with suppress(Exception):  # the others must not wait for what does not come
                self._channel.give_up(f"{self.what}: {error}")
        kind = "timeout" if isinstance(error, TimeoutError_) else "host work"
        with suppress(Exception):
            self.work.fail(self.call, kind, str(error))
        self._end()

    def give_up(self, why: str) -> None:
        """End it before it is complete: nobody works on it any more."""
        if self.call.failure is None:
            self.error = RevokedError(why)
        with suppress(Exception):
            self._channel.give_up(why)
        self._leave()

    def _leave(self) -> None:
        """End what has failed: its memory waits for the host."""
        with suppress(CommError):  # the device is gone, and its memory with it
            self.work.done(self.call)
        self._end()

    def _end(self) -> None:
        # The call lets go of its arrays even if somebody still holds the request.
        request, self._begin, self._request = self._request, None, None
        try:
            if request is not None:
                request.give_up("the call that it is a part of has ended")
        finally:
            self.over.set()

    @property
    def is_over(self) -> bool:
        """True if it has ended, or failed."""
        return self.over.is_set()

    @property
    def state(self) -> str:
        """The state of the job, in words."""
        if self._request is not None:
            return f"the host works on it: {self._request!r}"
        if self.is_over:
            return "its result is on the way to the device"
        return "its arrays are not on the host yet, or earlier such calls go on"


class _RefusedJob:
    """The place of a call that was refused on this rank, in the order of jobs."""

    def __init__(self, carrier: Refusing, error: Exception) -> None:
        self._carrier, self._why = carrier, str(error)
        self.is_over = False

    def advance(self, *, blocks: bool) -> bool:
        """Let the other ranks know."""
        if not self.is_over:
            self.is_over = True
            with suppress(Exception):  # it has failed meanwhile, which they know
                self._carrier.refuse(UsageError(self._why))
        return True

    def give_up(self, why: str) -> None:
        """Let the other ranks know, though no later job will run."""
        self.advance(blocks=False)


class _Feed:
    """Jobs in their order, and what their thread shares with who gives them."""

    def __init__(self) -> None:
        self.jobs: deque[HostJob | _RefusedJob] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.pid = os.getpid()
        self._running = threading.Lock()

    def advance_first(self, *, blocks: bool) -> bool:
        """Advance the first job, unless somebody does; True if that did anything."""
        if not self._running.acquire(blocking=False):
            return False
        try:
            if not self.jobs:
                return False
            first = self.jobs[0]
            try:
                with freeing_nothing():  # the device may wait for this very job
                    return first.advance(blocks=blocks)
            finally:
                if first.is_over:
                    self.jobs.popleft()
                    self._take_refused_places()
        finally:
            self._running.release()

    def _take_refused_places(self) -> None:
        """Do what waits for no device, though nobody may wait for it."""
        while self.jobs and isinstance(self.jobs[0], _RefusedJob):
            self.jobs.popleft().advance(blocks=False)

    def end_jobs(self, why: str, limit_s: float) -> None:
        """End what is left once it is closed: who waits for it must learn of it."""
        if not self._running.acquire(timeout=limit_s):
            return  # it is at work, and ends by itself
        try:
            while self.jobs:
                self.jobs[0].give_up(why)
                self.jobs.popleft()
        finally:
            self._running.release()

    def serve(self) -> None:
        """Do all jobs until closed; what the thread runs."""
        while True:
            with self.changed:
                while not (self.jobs or self.closed):
                    self.changed.wait()
                if self.closed:
                    return
            self._serve_first()

    def _serve_first(self) -> None:
        # In a function of its own: a thread that sleeps holds no job.
        if not self.advance_first(blocks=True) and self._running.locked():
            time.sleep(_NAP_S)  # somebody else is at it


def _close(feed: _Feed, threads: list[threading.Thread]) -> None:
    if feed.pid != os.getpid():
        return  # forked: threads are the parent's, and locks may be held for ever
    with feed.changed:
        feed.closed = True
        feed.changed.notify_all()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_END_S)


@dataclass(frozen=True)
class RefusedOnHost:
    """Takes the places of calls that were refused, which use a service of the host."""

    jobs: HostJobs
    service: str | None

    def refuse(self, error: Exception) -> None:
        """Take the place of a call that was refused here."""
        self.jobs.refuse(self.service, error)


class HostJobs:
    """A communicator's calls on device arrays whose work is the host's.

    Args:
        comm: the ranks.
        options: returns how work on a device uses pinned memory.
        make_channel: returns what the jobs go over; local.
    """

    def __init__(
        self,
        comm: Group,
        options: Callable[[Any], tuple[int, int, int, int, bool]],
        make_channel: Callable[[], HostChannel],
    ) -> None:
        self._comm, self._options, self._make_channel = comm, options, make_channel
        self._works: dict[int, tuple[Any, _native.HostWork]] = {}
        self._channel: HostChannel | None = None
        self._feed = _Feed()
        self._threads: list[threading.Thread] = []
        self._issue, self._opening = threading.Lock(), threading.Lock()
        self._finalizer: Any = None
        self.is_driven = False
        """True if a thread does the jobs."""

    @property
    def devices(self) -> list[Any]:
        """The devices that such calls were made on."""
        return [device for device, _ in self._works.values()]

    @property
    def works(self) -> list[_native.HostWork]:
        """The work of each device."""
        return [each for _, each in self._works.values()]

    def work(self, device: Any) -> _native.HostWork:
        """Return the copier there and back, made at the first such call."""
        found = self._works.get(id(device))
        if found is None:
            made = _native.HostWork(self._comm, device, *self._options(device))
            found = self._works[id(device)] = device, made
        return found[1]

    def channel(self, service: str | None) -> HostChannel:
        """Return the channel of the host's calls, ready for those of a service."""
        found = self._open()
        found.check_usable()
        found.carrier_of(service)  # made here: the thread finds it
        return found

    def _open(self) -> HostChannel:
        with self._opening:
            if self._channel is None:
                self._channel = self._make_channel()
            return self._channel

    def start(
        self,
        device: Any,
        arrays: Sequence[tuple[int, int, bool, bool]],
        stream: int,
        keep: Any,
        what: str,
        begin: Callable[[Sequence[int]], SteppedRequest],
        timeout_s: float,
        *,
        is_asked_for: bool,
    ) -> HostJob:
        """Give the device all that there is to do, and the host its part.

        Rows of ``arrays`` are (address, bytes, whether it is read, and written).
        """
        work = self.work(device)
        assert self._channel is not None
        try:
            with self._issue:  # the order of jobs is that of the device's commands
                call = work.start(list(arrays), stream, is_asked_for, keep, timeout_s)
                title = f"{what} #{call.seq} on {self._comm.name}"
                made = HostJob(
                    self._channel, device, work, call, title, begin, timeout_s
                )
                with self._feed.changed:
                    self._feed.jobs.append(made)
                    self._feed.changed.notify()
            self._start_thread(device)
            # The driver may hold this thread until the job is done.
            work.give_back(call)
        except DeviceError as error:
            if work.failed:  # the others must not wait for this call, nor a later one
                self.give_up(f"{what} on {self._comm.name}: {error}")
            raise
        return made

    def refuse(self, service: str | None, error: Exception) -> None:
        """Take the place of a call of a service that was refused on this rank.

        The other ranks' job of that place fails.
        """
        carrier = self._open().carrier_of(service)
        with self._issue, self._feed.changed:
            self._feed.jobs.append(_RefusedJob(carrier, error))
            self._feed.changed.notify()
        if not self.is_driven:
            self.step()

    def _start_thread(self, device: Any) -> None:
        if self.is_driven or device.kind == "simulated":
            return
        if env.read_str("COMMRT_PROGRESS") == "off":
            return
        self.is_driven = True
        feed, name = self._feed, f"commrt-host-{self._comm.name}"
        # It knows the jobs alone: who drops the communicator ends it.
        thread = threading.Thread(target=feed.serve, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._finalizer = weakref.finalize(self, _close, feed, self._threads)

    def step(self) -> bool:
        """Do the possible work of the first job by now; True if there was any."""
        return self._feed.advance_first(blocks=False)

    def finish(self, job: HostJob, deadline: float) -> bool:
        """Block until a job is over; False where time ran out before."""
        while not job.is_over:
            if time.monotonic() > deadline:
                return False
            if job.device.kind == "simulated":
                if self.is_driven or not self.step():
                    self._pause(job)
            elif self.is_driven:
                job.over.wait(_SLICE_S)
            elif not self._feed.advance_first(blocks=True) and not job.is_over:
                time.sleep(_NAP_S)
        return True

    def _pause(self, job: HostJob) -> None:
        if not self._comm.world.engine.step():
            job.device.pause()

    def give_up(self, why: str) -> None:
        """Let the other ranks wait for no job of this one."""
        self._open().give_up(why)

    def end_on_all_ranks(self, why: str) -> None:
        """End all jobs, on all ranks, also where this one has made no channel yet."""
        if self._channel is not None:
            self._channel.end_on_all_ranks(why)

    def close(self) -> None:
        """End the thread, and free what the jobs used."""
        if self._finalizer is not None:
            self._finalizer()
        is_own = threading.current_thread() in self._threads  # it collects garbage
        why = f"{self._comm.name} was freed"
        self._feed.end_jobs(why, 0 if is_own else _END_S)
        channel, self._channel = self._channel, None
        if channel is None or self._comm.closed == "dropped":
            return
        try:
            channel.free()
        except CommError:  # something hangs in it: its memory stays
            self._comm.world.lingering.append(channel)
