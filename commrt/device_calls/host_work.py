# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays whose work is Python's: sparse sums and others.

The call gives the device all there is to do (``host_work.hpp``): copies to
pinned memory behind the caller's stream, and the copies back, which wait there for the
host. The host's call, whose job is known before that, runs on pinned memory once the
arrays have come (``host_thread.py``), and the caller goes on. Only where the length of
a result is known at its end alone, nothing can be given before: then ``wait()`` blocks
until the host is done, and gives the device what came of it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.arrays.device import as_stream, current_stream_of, is_on_device, place_of
from commrt.arrays.host import HostView, empty_like_array, numpy_type, view_anywhere
from commrt.device_calls.host_thread import (
    HostChannel,
    HostJob,
    HostJobs,
    RefusedOnHost,
)
from commrt.device_calls.requests import DeviceRequest, late
from commrt.errors import CaptureError, UsageError
from commrt.group.stepped import SteppedRequest
from commrt.vocabulary.limits import check_timeout, deadline_after

if TYPE_CHECKING:
    from commrt.device_calls.collectives import DeviceCollectives
    from commrt.group.group import Group

Rebuild = Callable[[Any, Callable[[Any], Any]], Any]
"""The result on the device, given the host's and what puts an array there."""

__all__ = [
    "HostCall",
    "HostRequest",
    "HostResultRequest",
    "holds_device_arrays",
    "refuse_host_arrays",
    "start_host_call",
]


def holds_device_arrays(what: str, **arguments: Any) -> bool:
    """Return whether any argument of a call is, or consists of, device arrays.

    Raises BufferError_, which names the argument, where an array cannot say.
    """
    return any(
        is_on_device(part, f"{what}: {name}")
        for name, given in arguments.items()
        for part in (given if isinstance(given, tuple | list) else [given])
        if part is not None and not isinstance(part, str | int | float | np.ndarray)
    )


def refuse_host_arrays(what: str, given: Any) -> None:
    """Raise UsageError for an argument that is, or holds, an array of the host."""
    if isinstance(given, tuple | list):
        for number, each in enumerate(given):
            refuse_host_arrays(f"{what}[{number}]", each)
    elif (
        given is not None
        and not isinstance(given, int)
        and not is_on_device(given, what)
    ):
        raise UsageError(
            f"{what} is in host memory, and others of its arrays are on a device; pass "
            f"arrays of one place"
        )


@dataclass(frozen=True)
class HostCall:
    """A call of the host on arrays that a device has."""

    what: str
    """The operation."""
    service: str | None
    """The channel's service that it uses, which is opened before; or None."""
    reads: Sequence[HostView]
    writes: Sequence[HostView]
    """Some of them may be read, too."""
    call: Callable[[HostChannel, Callable[[HostView], Any]], SteppedRequest]
    """Starts the host's call, given where it goes and what tells an array's copy."""
    timeout_s: float
    result: Any = None
    """The result, where it is known at the call."""
    rebuild: Rebuild | None = None
    """Makes the result of that of the host, where it is known at the end alone."""


def start_host_call(
    group: Group,
    devices: DeviceCollectives,
    made: HostCall,
    *,
    nonblocking: bool,
    stream: Any = None,
) -> Any:
    """Start a call of the host on copies of arrays; return its output or request."""
    try:
        return _started(group, devices, made, nonblocking, stream)
    except Exception as error:
        carrier = RefusedOnHost(devices.host_jobs, made.service)
        comparison = devices.comm.comparison  # which has compared the ranks by now
        comparison.refuse(made.what, error, made.timeout_s, carrier, meets=True)
        raise


def _started(
    group: Group,
    devices: DeviceCollectives,
    made: HostCall,
    nonblocking: bool,
    stream: Any,
) -> Any:
    what = made.what
    views, places = _distinct(made.reads, made.writes)
    device = place_of(what, views)
    _check_apart(what, views)
    first = views[0].array
    if stream is None:
        handle = current_stream_of(first, device)
    else:
        handle = as_stream(stream, device, what)
    jobs = devices.host_jobs
    devices.cut_buckets()
    read = {places[id(each)] for each in made.reads}
    written = {places[id(each)] for each in made.writes}
    rows = [
        (each.address, each.nbytes, number in read, number in written)
        for number, each in enumerate(views)
    ]
    begins = _Begins(made, places)
    try:
        jobs.work(device).refuse_capture(handle)
        begins.channel = jobs.channel(made.service)
        devices.order_exported(device, handle, views)
        job = devices.launch(
            lambda: jobs.start(
                device,
                rows,
                handle,
                tuple(each.owner for each in views),
                what,
                begins,
                made.timeout_s,
                is_asked_for=nonblocking or made.rebuild is not None,
            )
        )
    except CaptureError as error:
        raise devices.why_not_started(what, error) from None
    of = (group, job.call, made.result, what, made.timeout_s, device, handle, first)
    request: HostRequest
    if made.rebuild is None:
        request = HostRequest(*of, job=job, jobs=jobs)
    else:
        request = HostResultRequest(
            *of, job=job, jobs=jobs, like=made.reads[-1], rebuild=made.rebuild
        )
    return request if nonblocking else request.wait_in(handle)


class _Begins:
    """Starts the host's part of a call on what the device has copied."""

    def __init__(self, made: HostCall, places: dict[int, int]) -> None:
        self.channel: HostChannel
        self._call, self._places = made.call, places
        # Types that numpy lacks raise an error in the call.
        self._types = {
            id(each): numpy_type(each) for each in (*made.reads, *made.writes)
        }

    def __call__(self, at: Sequence[int]) -> SteppedRequest:
        def copy_of(view: HostView) -> Any:
            return _memory_at(at[self._places[id(view)]], view, self._types[id(view)])

        return self._call(self.channel, copy_of)


def _memory_at(at: int, view: HostView, dtype: np.dtype[Any]) -> Any:
    """Return pinned memory as an array, which does not keep it."""
    if view.nbytes == 0:
        return np.empty(view.shape, dtype)
    raw: Any = (ctypes.c_ubyte * view.nbytes).from_address(at)
    found = np.frombuffer(raw, np.uint8).view(dtype).reshape(view.shape)
    found.flags.writeable = view.writable
    return found


def _distinct(
    *lists: Sequence[HostView],
) -> tuple[list[HostView], dict[int, int]]:
    """Return views of different memory, and which of them each one is of.

    An array that was passed twice has one copy; views are told apart by ``id``.
    """
    found: list[HostView] = []
    places: dict[int, int] = {}
    seen: dict[tuple[int, int], int] = {}
    for each in (view for views in lists for view in views):
        if id(each) in places:
            continue
        key = each.address, each.nbytes
        if not each.nbytes or key not in seen:
            seen[key] = len(found)
            found.append(each)
        places[id(each)] = seen[key]
    return found, places


def _check_apart(what: str, views: Sequence[HostView]) -> None:
    for index, one in enumerate(views):
        for other in views[:index]:
            low, high = one.address, one.address + one.nbytes
            if low < other.address + other.nbytes and other.address < high:
                raise UsageError(
                    f"{what}: two of its arrays overlap: pass separate ones, or the "
                    f"very same"
                )


class HostRequest(DeviceRequest):
    """One started call on device arrays whose work is the host's."""

    def __init__(self, *arguments: Any, job: HostJob, jobs: HostJobs) -> None:
        super().__init__(*arguments)
        self._jobs = jobs
        self._output, self._on, self._array = arguments[2], arguments[5], arguments[7]
        self._job = job

    def wait(self, *, stream: Any = None, timeout_s: float | None = None) -> Any:
        """Let a stream wait for the end, and return the output; see ``DeviceRequest``.

        Where streams have no flags, it blocks the host until its part is done.
        """
        if not self._on.memory_flags and timeout_s is None:
            self._finish(self.timeout_s)
        return super().wait(stream=stream, timeout_s=timeout_s)

    def wait_in(self, stream: int) -> Any:
        """The same of a blocking call, whose stream is the device's number for it."""
        self.be_quiet()
        if not self._on.memory_flags:
            self._finish(self.timeout_s)
        self.call.wait_on(stream)
        return self._output

    def synchronize(self, *, timeout_s: float | None = None) -> Any:
        """Block the host until the operation is complete; return the output."""
        limit = self._limit(timeout_s)
        start = time.monotonic()
        if not self._jobs.is_driven:
            self._finish(limit)
        left_s = max(1e-3, limit - (time.monotonic() - start))
        return super().synchronize(timeout_s=left_s)

    def test(self) -> bool:
        """Run a little progress; True once complete. Raises the operation's error."""
        if not self._jobs.is_driven:
            self._jobs.step()
        return super().test()

    @property
    def own_error(self) -> BaseException | None:
        """The error of the host's part."""
        return self._job.error

    def _limit(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return float(self.timeout_s)
        return check_timeout(self.title, timeout_s)

    def _finish(self, limit_s: float) -> None:
        if not self._jobs.finish(self._job, deadline_after(limit_s)):
            raise late(self, limit_s)

    def waits_for(self) -> str:
        return self._job.state


class HostResultRequest(HostRequest):
    """The same of a call whose result's length is known at its end alone."""

    def __init__(
        self,
        *arguments: Any,
        job: HostJob,
        jobs: HostJobs,
        like: HostView,
        rebuild: Rebuild,
    ) -> None:
        super().__init__(*arguments, job=job, jobs=jobs)
        self._like, self._rebuild = like, rebuild
        self._given: Any = None
        """The call that brings the result to the device."""
        self._made: Any = None

    def wait(self, *, stream: Any = None, timeout_s: float | None = None) -> Any:
        """Block the host until its part is done, then let a stream wait for the rest.

        Returns the output; raises the operation's error.
        """
        if stream is None:
            handle = current_stream_of(self._array, self._on)
        else:
            handle = as_stream(stream, self._on, self.title)
        return self.wait_in(handle, timeout_s)

    def wait_in(self, stream: int, timeout_s: float | None = None) -> Any:
        """The same, with the device's number for the stream."""
        self.be_quiet()
        self._finish(self._limit(timeout_s))
        if self._job.error is not None or self.call.failure is not None:
            return super().wait()  # raises it
        self.call.wait_on(stream)
        if self._given is None:
            self._give_result(stream)
        self._given.wait_on(stream)
        return self._made

    def synchronize(self, *, timeout_s: float | None = None) -> Any:
        """Block the host until the operation is complete; return the output."""
        limit = self._limit(timeout_s)
        deadline = deadline_after(limit)
        result = self.wait(timeout_s=limit)
        super().synchronize(timeout_s=max(1e-3, deadline - time.monotonic()))
        if not self._given.synchronize(max(1e-3, deadline - time.monotonic())):
            raise late(self, limit)
        return result

    def _give_result(self, stream: int) -> None:
        """Put what the host's call returned on the device, behind a stream."""
        found: list[tuple[Any, HostView]] = []

        def put(array: Any) -> Any:
            made = empty_like_array(self._like, array.shape, array.dtype.name)
            found.append((array, view_anywhere(made, "the result")))
            return made

        made = self._rebuild(self._job.found, put)
        work = self._job.work
        rows = [(view.address, view.nbytes, False, True) for _, view in found]
        keep = tuple(view.owner for _, view in found)
        call = work.start(rows, stream, True, keep, self.timeout_s)
        for (array, view), place in zip(found, work.places(call), strict=True):
            raw = np.ascontiguousarray(array)
            ctypes.memmove(place, raw.ctypes.data, view.nbytes)
        work.done(call)
        work.give_back(call)
        self._made, self._given = made, call
