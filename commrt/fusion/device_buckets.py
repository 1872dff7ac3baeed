# SPDX-License-Identifier: Apache-2.0
"""Buckets of arrays on devices, for the calls within ``comm.fused()``.

A call notes the work in its stream, and becomes a part of the bucket of its device,
element type and reduction. The C++ part (``calls/fusion.cpp``) decides the calls in a
bucket, the time when it is sent, and the order of buckets. It decides for arrays of the
host and of devices together, as all ranks must do the same. A bucket is one allreduce:

    gathers:    wait for what the streams held at the calls; the arrays into a block
    collective: in place on the block, whatever runs it
    puts_back:  wait for the collective; the parts of the block to the outputs; end

Streams are one rank's own affair, so calls from several of them share a bucket, which
waits for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from commrt import _native
from commrt.arrays.device import current_stream_of, is_on_device, see
from commrt.arrays.host import HostView
from commrt.calls.arguments import Bound, Call, allreduce_in_place
from commrt.device_calls.collectives import DeviceCollectives
from commrt.errors import CommError, RefusedError, UsageError
from commrt.fusion.device_copies import Block, BucketCopies, Part
from commrt.fusion.device_requests import FusedDeviceRequest, SentBucket
from commrt.fusion.failed_buckets import FailedBuckets
from commrt.group.deferred_release import StagedWork
from commrt.group.group import Group
from commrt.vocabulary.dtypes import DType, ReduceOp
from commrt.vocabulary.operations import FUSED
from commrt.vocabulary.reduction_names import reduce_op

__all__ = ["DeviceBuckets", "Rules"]

_PLAIN = frozenset(("op", "nonblocking"))
"""Arguments that a call may have to go the way of one before."""


class Rules(Protocol):
    """Rules that hold for buckets of every place; ``comm.fusion`` has them."""

    @property
    def nbytes(self) -> int | None:
        """Bytes that the buckets of the open context hold; None: none is open."""

    def choose(self, call: Call, bound: Bound) -> object:
        """Return the algorithm of a call; UsageError where nothing can run it."""

    def refuse_what_no_bucket_runs(self, call: Call, bound: Bound, most: int) -> None:
        """Raise UsageError where nothing can run the call, in whatever company."""

    def have_sent(self, call: int, seconds: float) -> None:
        """Send a call, or wait so long for the ranks to agree that it may be sent."""


class DeviceBuckets:
    """A communicator's buckets of arrays on devices."""

    def __init__(self, group: Group, devices: DeviceCollectives, rules: Rules) -> None:
        """Make no bucket yet: a device has memory for them from its first call on."""
        self._group, self._devices, self._rules = group, devices, rules
        self.lanes: dict[int, _Lane] = {}
        """Lane of each device, by its ``id``."""
        self._checked: set[tuple[str, DType]] = set()
        """Reductions and types that need no checks."""

    def add(
        self, call: Call, bound: Bound, most_nbytes: int
    ) -> FusedDeviceRequest | None:
        """Return the request of a call; None for one that must run by itself.

        That is what a stream is captured for: a graph has no bucket to go with.
        """
        group, devices = self._group, self._devices
        devices.check(call, bound)
        device, x, out = bound.on, bound.x, bound.out
        assert x is not None
        assert out is not None
        stream = devices.stream_of(call, device, x.array)
        if device.is_capturing(stream):
            return None
        self._rules.refuse_what_no_bucket_runs(call, bound, most_nbytes)
        devices.order_exported(device, stream, (x, out))
        if group.checker is None:
            self._checked.add((call.reduction.name.lower(), bound.dtype))
        else:
            group.checker.check(call, bound)
        timeout_s = group.timeout_s if call.timeout_s is None else call.timeout_s
        return self._add(x, out, stream, call.reduction, bound.result, timeout_s)

    def again(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FusedDeviceRequest | None:
        """Return the request of a call in place like one before: its checks hold.

        None for all others, which are looked at in full. To parse and to bind a call
        takes several times as long as all that is left.
        """
        nbytes = self._rules.nbytes
        op = kwargs.get("op", "sum")
        if (
            name not in FUSED
            or self._group.nan_check
            or not self._checked
            or nbytes is None
            or len(args) != 1
            or not _PLAIN.issuperset(kwargs)
            or type(op) is not str
            or not is_on_device(args[0])
        ):
            return None
        array = args[0]
        seen = see(array, name)
        is_checked = (op, seen.dtype) in self._checked and seen.writable
        if not is_checked or seen.count * seen.dtype.itemsize >= nbytes:
            return None
        stream = current_stream_of(array, seen.device)
        if seen.device.is_capturing(stream):
            return None
        x = HostView(
            array,
            (array, seen.owner),
            seen.address,
            seen.count,
            seen.dtype,
            seen.shape,
            True,
            seen.number,
            seen.stream,
            on=seen.device,
        )
        self._devices.order_exported(seen.device, stream, (x,))
        return self._add(x, x, stream, reduce_op(op), array, self._group.timeout_s)

    def _add(
        self,
        x: HostView,
        out: HostView,
        stream: int,
        reduction: ReduceOp,
        result: Any,
        timeout_s: float,
    ) -> FusedDeviceRequest | None:
        group, rules = self._group, self._rules
        lane = self.lane_of(x.on)
        nbytes = rules.nbytes
        if nbytes is not None:
            lane.copies.reserve(nbytes)
        lane.sweep()
        part = Part(x, out, reduction, stream, lane.copies.note(stream))
        request = FusedDeviceRequest(group, rules.have_sent, part, result, timeout_s)
        try:
            number = _native.fuse_away(
                group, lane, request, x.count, x.dtype.code, int(reduction)
            )
        except BaseException:
            request.be_quiet()  # its caller never has it
            raise
        if number is None:  # the context is over
            request.be_quiet()
            return None
        request.number = number
        return request

    def lane_of(self, device: Any) -> _Lane:
        """Return the buckets of a device, made at its first call."""
        found = self.lanes.get(id(device))
        if found is None:
            made = _Lane(self._group, self._devices, self._rules, device)
            found = self.lanes[id(device)] = made
        return found

    def close(self) -> list[FailedBuckets]:
        """Give streams and memory back; return what is to be given back later.

        The caller closes the runners of the collectives after this.
        """
        found = [each.close() for each in self.lanes.values()]
        return [each for each in found if each is not None]

    @property
    def outstanding(self) -> int:
        """Buckets that the host has not seen the end of."""
        return sum(lane.outstanding for lane in self.lanes.values())


class _Lane:
    """One device's buckets. The C++ part calls ``send`` and ``fail``."""

    def __init__(
        self,
        group: Group,
        devices: DeviceCollectives,
        rules: Rules,
        device: Any,
    ) -> None:
        self._engine = group.world.engine
        self._devices, self._rules = devices, rules
        self._device = device
        self.copies = BucketCopies(device)
        self._under_way: deque[SentBucket] = deque()
        self._runners: dict[int, StagedWork] = {}
        """Runners of collectives whose end no stream may have been told to wait for."""
        self._is_lost = False
        """True if the device has something of a bucket that was not sent."""
        self._is_known = True
        """True if somebody can say when the device is done with all collectives."""
        self._is_closed = False

    def send(self, requests: Sequence[FusedDeviceRequest]) -> BaseException | None:
        """Send calls of one type and reduction as one; return what interrupted it.

        Whatever it raises is before the collective has started.
        """
        self.sweep()
        parts = [each.part for each in requests if each.part is not None]
        call, bound = self._allreduce(parts)
        try:
            plan = self._devices.plan(call, bound, is_checked=True)
        except RefusedError as error:  # that rank's later buckets have other calls
            self._devices.comm.give_up(str(error))
            raise
        except UsageError:
            try:
                self._rules.choose(call, bound)
            except UsageError as error:  # on all ranks alike
                self.fail(requests, error)
                return None
            raise
        copies, is_watched = self.copies, self._devices.ends_by_itself(plan)
        with copies.outside_captures(), self._lost_where_it_fails(is_watched):
            if not is_watched:
                runner = self._devices.runner(self._device, plan)
                self._runners[id(runner)] = runner
            block = copies.blocks.take(sum(each.x.nbytes for each in parts))
            copies.gather(parts, block, is_idle=not self._under_way)
            started = self._devices.start(call, _at(bound, block), plan)
        started.be_quiet()
        bucket = SentBucket(self._engine, copies, started, parts, block)
        self._under_way.append(bucket)
        for each in requests:
            each.went_with(bucket)
        interrupted = self._put_back(bucket, is_watched)
        if is_watched and not bucket.is_followed:
            self._is_known = False
        return interrupted

    @contextmanager
    def _lost_where_it_fails(self, is_watched: bool) -> Iterator[None]:
        """Remember that the device may have a part of what was to be sent."""
        try:
            yield
        except BaseException:
            self._is_lost = True
            self._is_known = self._is_known and not is_watched
            raise

    def _put_back(self, bucket: SentBucket, is_watched: bool) -> BaseException | None:
        """Give the device the rest, where it can have that by now.

        Where that fails the requests come to it again, and tell.
        """
        if not (is_watched or self._devices.lets_streams_wait(self._device)):
            return None
        try:
            bucket.put_back()
        except Exception:  # noqa: BLE001 - see above
            return None
        except BaseException as error:  # noqa: BLE001 - raised by the C++ part
            return error
        return None

    def fail(
        self, requests: Sequence[FusedDeviceRequest | None], why: BaseException
    ) -> None:
        """End calls that are not sent; one that was refused has no request."""
        for each in requests:
            if each is not None:
                each.failed_by(why)

    def _allreduce(self, parts: Sequence[Part]) -> tuple[Call, Bound]:
        """Return the call that makes a plan for a bucket, before there is a block."""
        first, reduction = parts[0].x, parts[0].reduction
        count = sum(each.x.count for each in parts)
        array = HostView(
            None,
            None,
            0,
            count,
            first.dtype,
            (count,),
            True,
            first.device,
            on=self._device,
        )
        return allreduce_in_place(array, reduction, stream=self.copies.gathers)

    def sweep(self) -> None:
        """Let arrays go that nobody works on any more."""
        while True:
            try:
                first = self._under_way[0]
            except IndexError:
                return
            if not first.has_ended():
                return
            # The work of the collective may still use the block.
            self._is_lost = self._is_lost or first.failure is not None
            with suppress(ValueError):  # another thread has seen it, too
                self._under_way.remove(first)

    @property
    def outstanding(self) -> int:
        """Buckets that the host has not seen the end of."""
        self.sweep()
        return len(self._under_way)

    def close(self) -> FailedBuckets | None:
        """Give streams and memory back; what may be in use is returned, for later."""
        if self._is_closed:
            return None
        self._is_closed = True
        with suppress(CommError):  # what failed may still be under way
            self.sweep()  # gives the device what it has not been given yet
            if all(each.is_whole for each in self._under_way) and not self._is_lost:
                self._device.stream_synchronize(self.copies.puts_back.handle)
                self.sweep()
                if not self._under_way:
                    self.copies.close()
                    return None
        return self._leave()

    def _leave(self) -> FailedBuckets | None:
        kept = [self._under_way.popleft() for _ in range(len(self._under_way))]
        try:
            return FailedBuckets(
                self._engine,
                self.copies,
                list(self._runners.values()),
                [each.arrays for each in kept],
                is_known=self._is_known,
            )
        except CommError:  # the device is gone, and has taken its memory along
            return None


def _at(bound: Bound, block: Block) -> Bound:
    """Return the same with the array in a block."""
    assert bound.x is not None
    array = replace(bound.x, address=block.address)
    return replace(bound, x=array, out=array, result=None)
