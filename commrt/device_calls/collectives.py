# SPDX-License-Identifier: Apache-2.0
"""Collectives on arrays on devices: their plans, their starts and their requests.

A backend makes the plan and runs it; none is known here by name.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from commrt import _native
from commrt.arrays.device import (
    as_stream,
    current_stream_of,
    device_number,
    seems_on_device,
)
from commrt.backends.agreement import meet
from commrt.backends.base import Attached
from commrt.calls.channel import Channel
from commrt.device_calls.host_collectives import (
    BoundHostCall,
    Compressed,
    host_part_of,
    runs_on_host,
    service_of,
    would_run_on_host,
)
from commrt.device_calls.host_thread import HostChannel, HostJobs, RefusedOnHost
from commrt.device_calls.host_work import HostCall, start_host_call
from commrt.device_calls.refused_calls import RefusedCalls, words_of
from commrt.device_calls.requests import DeviceRequest
from commrt.device_calls.uploads import Uploads
from commrt.devices.arrays import DeviceStream, free_what_was_left
from commrt.devices.registry import cuda_device
from commrt.errors import CaptureError, CommError, DeviceError, UsageError
from commrt.group.compare import Refusing
from commrt.group.deferred_release import (
    DeferredWork,
    StagedWork,
    defer,
    release_finished,
)
from commrt.group.finite_values import check_finite_on_stream
from commrt.planning.kept_plans import KeptPlans

if TYPE_CHECKING:
    from commrt.calls.arguments import Bound, Call

__all__ = ["BoundDeviceCall", "DeviceCollectives", "DeviceUser"]

T = TypeVar("T")

_SLOTS = 4
"""Pieces of a call that have pinned memory at once: one on its way to the host, one
that is combined, one on its way back, and one to spare."""
_FIRST_NBYTES = 1 << 20
_MOST_NBYTES = 256 << 20


class DevicePlan(Protocol):
    """A call on a device, as its backend makes it (``Attached.plan``)."""

    @property
    def backend(self) -> str:
        """Name of the backend whose runner starts it."""
        ...


class DeviceUser(Protocol):
    """A service that has streams and memory of its own on devices."""

    @property
    def outstanding(self) -> int:
        """Things under way whose end the host has not seen."""

    def close_on_devices(self) -> Sequence[DeferredWork]:
        """Give streams and memory back; return what is to be given back later.

        The caller closes the backends' runners after this.
        """


class DeviceCollectives:
    """A communicator's work on devices.

    Args:
        comm: the ranks.
        make_host_channel: returns what the host's parts of calls go over; local.
        compress: returns a compressed call, checked.
    """

    asked_by: ClassVar[tuple[str, ...]] = ()
    is_open = True
    again = None
    """The engine itself starts calls like one before."""

    def __init__(
        self,
        comm: Channel,
        make_host_channel: Callable[[], HostChannel],
        compress: Callable[[Call, Bound], Compressed | None],
    ) -> None:
        self.comm = comm
        self.attached = comm.attached
        self.selection = comm.selection
        self._compress = compress
        self.is_agreed = False
        """True if the ranks have told each other what carries device arrays."""
        self.refused = RefusedCalls(comm, weakref.proxy(self))
        """Refuses calls that other ranks may have given to devices."""
        self.users: list[DeviceUser] = []
        """Services that end with this."""
        self._stagers: dict[int, tuple[Any, _native.Stager]] = {}
        self._messages: dict[int, tuple[Any, _native.MessageStager]] = {}
        own = weakref.proxy(self)
        self.host_jobs = HostJobs(
            comm, lambda device: own.options(device), make_host_channel
        )
        self.plans: KeptPlans[DevicePlan] = KeptPlans(comm)
        """Plans of calls that Python has looked at."""
        self._own_events: dict[tuple[int, int], tuple[Any, int]] = {}
        """Events by thread and device: no other thread may record one between two
        calls."""
        self.memory: weakref.WeakSet[Any] = weakref.WeakSet()
        """Holders of memory of devices, which goes with the communicator."""
        self._uploads: dict[int, Uploads] = {}
        self.slots = _SLOTS
        self.first_nbytes = _FIRST_NBYTES
        self.most_nbytes = _MOST_NBYTES
        self.first_value = 0
        self.flags_without_progress = False
        """Switch for tests: streams wait for this process though nobody makes
        progress."""

    def prepare(self, call: Call, bound: Bound) -> Callable[[], Any]:
        """Return what starts a call on device arrays, or one ordered by a stream."""
        if runs_on_host(call):
            self.check(call, bound)
            return partial(self._run_on_host, call, self.host_part(call, bound))
        try:
            plan = self.plan(call, bound)
        except CaptureError as error:
            raise self.why_not_started(call.spec.name, error) from None
        return partial(self._run, call, bound, plan)

    def _run(self, call: Call, bound: Bound, plan: DevicePlan) -> Any:
        """Start a planned call; return its output or its request."""
        try:
            request = self.start(call, bound, plan)
        except CaptureError as error:
            raise self.why_not_started(call.spec.name, error) from None
        self._cache(call, bound, plan)
        if call.nonblocking:
            return request
        request.be_quiet()
        return bound.result

    def _run_on_host(self, call: Call, part: HostCall) -> Any:
        return start_host_call(
            self.comm, self, part, nonblocking=call.nonblocking, stream=call.stream
        )

    def carrier_on_host(
        self, args: tuple[Any, ...], arguments: Mapping[str, Any]
    ) -> Refusing | None:
        """Return what carries a call on device arrays that the host runs.

        The arguments may be wrong. None: it has no array on a device, or a device or
        an engine's thread runs it.
        """
        if not would_run_on_host(args[1:], arguments):
            return None
        given = [*args[:1], *map(arguments.get, ("x", "out", "residual"))]
        is_here = arguments.get("stream") is not None
        if not (is_here or any(map(seems_on_device, given))):
            return None
        return RefusedOnHost(self.host_jobs, service_of(arguments.get("compress")))

    def host_part(self, call: Call, bound: Bound) -> HostCall:
        """Return the host's part of a call whose work is Python's; see its errors."""
        return host_part_of(self.comm, self._compress, call, bound)

    def why_not_started(self, name: str, error: Exception) -> Exception:
        """Return the error to raise when the device rejects a call."""
        comm = self.comm
        if isinstance(error, CaptureError):
            text = f"{name} on {comm.name}, rank {comm.rank}: {error}"
            return CaptureError(text, error.status)
        self._check_not_failed(error)
        return error

    def can_carry(
        self, backend: str, device: Any, what: str, stream: int, timeout_s: float
    ) -> bool:
        """Return whether a backend's runner can be had, on all ranks alike; collective.

        The first time the ranks meet for it, as they do in a collective's first call.
        """
        self.cut_buckets()
        self.refused.know(device)
        carrier = self.attached[backend]
        if not carrier.is_agreed:
            self.agree(device, what, timeout_s)
        return not carrier.why_no_devices and carrier.prepare(device, stream)

    def box_carrier(
        self, device: Any, what: str, stream: int, timeout_s: float
    ) -> Attached | None:
        """Return the backend that moves boxes between devices, on all ranks alike.

        None where they go through pinned memory. Collective, as ``can_carry``.
        """
        self.refused.know(device)
        where = device, what, stream, timeout_s
        for name, carrier in self.attached.items():
            if carrier.carries_boxes and self.can_carry(name, *where):
                return carrier
        return None

    def name_of(self, carrier: Attached | None) -> str:
        """Return the name of what moves boxes; None: the host, by pinned memory."""
        return _native.StagedPlan.backend if carrier is None else carrier.backend.name

    def agree(self, device: Any, what: str, timeout_s: float) -> None:
        """Let the ranks tell each other what carries device arrays; collective."""
        meet(self.comm, self.attached, self.comm.give_up, device, what, timeout_s)
        self.is_agreed = True
        self.forget_choices()

    def cut_buckets(self) -> None:
        """Send the open buckets of fused calls before a call that is in none."""
        _native.make_way_in_fusion(self.comm)

    def runner(self, device: Any, plan: DevicePlan) -> Any:
        """Return the runner that starts a plan."""
        return self.attached[plan.backend].runner(device)

    def ends_by_itself(self, plan: DevicePlan) -> bool:
        """Return whether the device ends a call without progress of the host."""
        return self.attached[plan.backend].ends_by_itself

    def launch(self, start: Callable[[], T]) -> T:
        """Call ``start`` and return its result; an error says if the group failed."""
        try:
            return start()
        except DeviceError as error:
            self._check_not_failed(error)
            raise

    def _check_not_failed(self, error: Exception) -> None:
        """Raise the communicator's error if it failed since a call began."""
        if isinstance(error, DeviceError) and error.status == "not_ready":
            self.comm.check_usable()

    def _cache(self, call: Call, bound: Bound, plan: DevicePlan) -> None:
        """Let calls like this one be started without Python (device_call_cache.hpp)."""
        spec, x, out = call.spec, bound.x, bound.out
        if call.backend is not None or call.algorithm is not None:
            return
        carrier = self.attached[plan.backend]
        if (
            self.comm.checker is not None
            or not carrier.is_dispatched
            or call.params is not None
            or call.user is not None
            or call.factor is not None
            or spec.count_arguments
            or call.x is None
            or (call.out is None and not spec.in_place)
        ):
            return
        device = self._device(call, bound)
        _native.cache_device_call(
            self.comm,
            coll=spec.code,
            reduction=int(call.reduction),
            root=call.root,
            dtype=bound.dtype.code,
            count=bound.num_elements if x is None else x.count,
            device=device,
            runner=carrier.runner(device),
            plan=plan,
            gives_out=call.out is not None,
            sends=x is not None,
            receives=out is not None,
            in_place=spec.in_place,
            out_count=bound.out_elements,
            detours=carrier.detours,
        )

    def start(self, call: Call, bound: Bound, plan: DevicePlan) -> DeviceRequest:
        """Give the device and the engine all that there is to do."""
        comm, name = self.comm, call.spec.name
        _native.make_way_in_fusion(comm)
        device = self._device(call, bound)
        x, out = bound.x, bound.out
        arrays = [each for each in (x, out) if each is not None]
        default = arrays[0].array if arrays else None
        stream = self.stream_of(call, device, default)
        self.order_exported(device, stream, arrays)
        timeout_s = comm.timeout_s if call.timeout_s is None else call.timeout_s
        runner = self.runner(device, plan)
        started = self.launch(
            lambda: runner.start(
                plan,
                0 if x is None else x.address,
                0 if out is None else out.address,
                stream,
                not call.nonblocking,
                None if x is None else x.owner,
                None if out is None else out.owner,
                timeout_s,
            )
        )
        return DeviceRequest(
            comm, started, bound.result, name, timeout_s, device, stream, default
        )

    @staticmethod
    def stream_of(call: Call, device: Any, array: Any) -> int:
        """Return the stream that orders a call."""
        if call.stream is None:
            return current_stream_of(array, device)
        return as_stream(call.stream, device, call.spec.name)

    def bind(self, call: Call, bound: Bound) -> BoundDeviceCall | BoundHostCall:
        """Return the call bound to its arrays, to run it any number of times."""
        if runs_on_host(call):
            return BoundHostCall(self, call, bound)
        plan = self.plan(call, bound)
        self.runner(self._device(call, bound), plan)
        return BoundDeviceCall(self, call, bound, plan)

    def plan(self, call: Call, bound: Bound, *, is_checked: bool = False) -> DevicePlan:
        """Return the plan; in check mode only where all ranks made the same call."""
        self.cut_buckets()
        self.check(call, bound)
        self.refused.know(self._device(call, bound))
        checker = None if is_checked else self.comm.checker
        if not self.is_agreed:
            # Before the ranks meet for it: where they differ, check mode says so.
            if checker is not None:
                checker.check(call, bound)
            limit = call.timeout_s or self.comm.timeout_s
            self.agree(self._device(call, bound), call.spec.name, limit)
            checker = None
        plan = self._plan(call, bound)
        if checker is not None:
            checker.check(call, bound)
        while not self._can_give(call, bound, plan):
            plan = self._plan(call, bound)
        return plan

    def _can_give(self, call: Call, bound: Bound, plan: DevicePlan) -> bool:
        """Prepare the device for the plan; False if that failed, on all ranks alike.

        Then the ranks choose among what is left.
        """
        carrier = self.attached[plan.backend]
        if not carrier.prepares:
            return True
        device = self._device(call, bound)
        first = bound.out if bound.x is None else bound.x
        array = None if first is None else first.array
        if carrier.prepare(device, self.stream_of(call, device, array)):
            return True
        self.forget_choices()
        return False

    def forget_choices(self) -> None:
        """Choose anew from here on: other backends can run calls."""
        self.forget_plans()
        self.selection.choices.forget()

    def _plan(self, call: Call, bound: Bound) -> DevicePlan:
        key = (
            call.spec.code,
            bound.num_elements,
            bound.dtype.name,
            call.reduction if call.user is None else call.user,
            call.root,
            call.factor,
            call.backend,
            call.algorithm,
            tuple(sorted((call.params or {}).items())),
            bound.counts,
            bound.in_elements,
            bound.out_elements,
        )
        plan = self.plans.find(key)
        if plan is None:
            plan, chosen = self.selection.planned(call, bound)
            if hasattr(plan, "words"):  # another package's need not have it
                plan.words = words_of(call, bound, chosen)
            self.plans.keep(key, plan)
        return plan

    def check(self, call: Call, bound: Bound) -> None:
        """Raise UsageError for what cannot be done on devices."""
        name = call.spec.name
        if bound.on is None and call.spec.x_count != "none":
            raise UsageError(
                f"{name}: stream= is for arrays on devices, and these are in host "
                f"memory; leave it out"
            )
        x, out = bound.x, bound.out
        if x is not None and out is not None and x.on is not out.on:
            raise UsageError(
                f"{name}: x and out are not on the same device: {_place(bound.x)} and "
                f"{_place(bound.out)}; pass arrays of one device"
            )
        if call.stream is not None:  # before the ranks are compared
            as_stream(call.stream, self._device(call, bound), name)

    def _device(self, call: Call, bound: Bound) -> Any:
        if bound.on is not None:
            return bound.on
        if isinstance(call.stream, DeviceStream):  # a barrier has no array
            return call.stream.device
        return cuda_device(device_number(call.stream, call.spec.name) or 0)

    def order_exported(self, device: Any, stream: int, arrays: Sequence[Any]) -> None:
        """Let the call come after the streams that its arrays are ordered by."""
        for each in arrays:
            if each.stream is not None and each.stream != stream:
                self.order_after(device, stream, each.stream)

    def order_after(self, device: Any, stream: int, exported: int) -> None:
        """Let a call in one stream come after what another was given so far."""
        if device.capture_id(exported) != device.capture_id(stream):
            raise CaptureError(
                f"an array is ordered by stream {exported}, and stream {stream} is "
                f"the call's: one of them is being captured, and the other one is not "
                f"a part of that. Call it outside of the capture, or with a stream of "
                f"it; nothing was given to the device",
                "capturing",
            )
        key = threading.get_ident(), id(device)
        if key not in self._own_events:
            self._own_events[key] = device, device.event_create()
        _, event = self._own_events[key]
        device.event_record(event, exported)
        device.stream_wait_event(stream, event)

    def stager(self, device: Any) -> _native.Stager:
        """Return the runner of collectives on a device, made at the first one.

        It allocates pinned memory, streams and events, which may wait for the device.
        """
        found = self._stagers.get(id(device))
        if found is None:
            made = _native.Stager(self.comm, device, *self.options(device))
            found = self._stagers[id(device)] = device, made
        return found[1]

    def messages(self, device: Any) -> _native.MessageStager:
        """Return the carrier of messages there, made at the first message."""
        found = self._messages.get(id(device))
        if found is None:
            made = _native.MessageStager(self.comm, device, *self.options(device))
            found = self._messages[id(device)] = device, made
        return found[1]

    def uploads(self, device: Any) -> Uploads:
        """Return what copies tables to a device, made at the first one."""
        found = self._uploads.get(id(device))
        if found is None:
            found = self._uploads[id(device)] = Uploads(device)
            self.memory.add(found)
        return found

    def options(self, device: Any) -> tuple[int, int, int, int, bool]:
        """Return the use of pinned memory by work on a device: slots, bytes, flags."""
        flags = self.lets_streams_wait(device)
        release_finished(self.comm.world)
        options = self.slots, self.first_nbytes, self.most_nbytes, self.first_value
        return *options, flags

    def lets_streams_wait(self, device: Any) -> bool:
        """Return whether streams wait for this process; else ``wait()`` blocks."""
        helped = self.comm.world.drive(device) or self.flags_without_progress
        return helped and bool(device.memory_flags)

    def forget_plans(self) -> None:
        """Make plans anew from here on."""
        self.plans.forget()
        _native.forget_device_calls(self.comm)

    @property
    def outstanding(self) -> int:
        """Calls whose end the host has not seen."""
        pinned = sum(each.outstanding for each in self._work)
        carried = sum(each.outstanding for each in self.attached.values())
        return pinned + carried + sum(each.outstanding for each in self.users)

    @property
    def _work(self) -> list[StagedWork]:
        found: list[StagedWork] = [each for _, each in self._stagers.values()]
        found += [each for _, each in self._messages.values()]
        return found + self.host_jobs.works

    def give_up(self, why: str) -> None:
        """Fail what is under way, and let its streams go."""
        self._fail(why, self.host_jobs.give_up)

    def end_on_all_ranks(self, why: str) -> None:
        """Fail what is under way, also on the other ranks."""
        self._fail(why, self.host_jobs.end_on_all_ranks)

    def _fail(self, why: str, end_jobs: Callable[[str], None]) -> None:
        for each in self._work:
            each.give_up(why)
        end_jobs(why)
        for carrier in self.attached.values():
            carrier.give_up(why)

    def close(self) -> None:
        """Give streams and memory back, where nothing is under way."""
        self.refused.close()
        self.forget_plans()
        waits = any(each.failed or each.outstanding for each in self._work)
        carriers = self.attached.values()
        if not (waits or any(c.carries_boxes and c.outstanding for c in carriers)):
            for kept in list(self.memory):
                with suppress(CommError):  # a device that is gone took it along
                    kept.close()
        self.host_jobs.close()
        used = [on for on, _ in self._stagers.values()]
        used += self.host_jobs.devices
        left = [rest for user in self.users for rest in user.close_on_devices()]
        work = self._work
        for each in work:
            each.close()
        defer(self.comm.world, work)
        may_call = self.comm.closed != "dropped"
        if may_call and not waits:  # to give pinned memory back waited just as well
            _native.drop_ended(self.comm.world.engine)
            for device in used:
                free_what_was_left(device)
        for carrier in carriers:
            carrier.close(may_call=may_call)
        defer(self.comm.world, left)  # once what they used is closed
        while self._own_events:
            _, (device, event) = self._own_events.popitem()
            with suppress(CommError):  # the device may be gone
                device.event_destroy(event)


def _place(seen: Any) -> str:
    return "host memory" if seen is None or seen.on is None else f"device {seen.device}"


class BoundDeviceCall:
    """A collective bound to its arrays on a device; call it, or ``start()`` it."""

    def __init__(
        self, devices: DeviceCollectives, call: Call, bound: Bound, plan: DevicePlan
    ) -> None:
        self._devices, self._bound, self._plan = devices, bound, plan
        self._calls = [replace(call, nonblocking=flag) for flag in (False, True)]
        self._places = bound.places

    def __call__(self) -> Any:
        """Run the operation; the current stream waits for it. Return its output."""
        self._check(self._calls[0])
        started = self._devices.start(self._calls[0], self._bound, self._plan)
        started.be_quiet()
        self._devices.refused.raise_untold(started.seq, self._bound.result)
        return self._bound.result

    def start(self) -> DeviceRequest:
        """Start the operation and return its request."""
        self._check(self._calls[1])
        request = self._devices.start(self._calls[1], self._bound, self._plan)
        self._devices.refused.raise_untold(request.seq, request)
        return request

    def _check(self, call: Call) -> None:
        comm = self._devices.comm
        comm.check_usable()
        comm.check_places(self._places, self.operation)
        where = self.operation, self._bound.x, call.stream
        comm.check_bound(lambda: check_finite_on_stream(comm, *where))

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self._calls[0].spec.name

    @property
    def label(self) -> str:
        """The candidate that runs it: backend/algorithm{params}."""
        return str(self._devices.selection.choose(self._calls[0], self._bound))
