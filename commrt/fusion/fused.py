# SPDX-License-Identifier: Apache-2.0
"""Fusion: ``with comm.fused():`` sends short allreduces together.

The C++ part (``calls/fusion.cpp``) collects the calls in buckets. A cut sends the calls
collected so far, and all ranks must cut at the same calls. Without a time limit the
cuts follow from the calls. With one the ranks agree (``fusion/agreement.py``).
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar

from commrt import _native
from commrt.arrays.host import HostView
from commrt.calls.arguments import Bound, Call, allreduce_in_place
from commrt.calls.channel import Channel
from commrt.device_calls.collectives import DeviceCollectives
from commrt.device_calls.host_collectives import runs_on_host
from commrt.errors import (
    CaptureError,
    CommError,
    RefusedError,
    UsageError,
    shown,
)
from commrt.fusion.agreement import Agreement, Follower, Leader
from commrt.fusion.device_buckets import DeviceBuckets
from commrt.fusion.device_requests import FusedDeviceRequest
from commrt.fusion.failed_buckets import FailedBuckets
from commrt.fusion.lost_count import LostCount
from commrt.select.facts import Candidate
from commrt.vocabulary.checks import as_integer
from commrt.vocabulary.dtypes import DTYPES, ReduceOp
from commrt.vocabulary.limits import check_timeout
from commrt.vocabulary.reduction_names import reduce_op

__all__ = ["DEFAULT_NBYTES", "Fused", "Fusion"]

DEFAULT_NBYTES = 4 * 1024 * 1024
"""Bytes in a bucket unless the caller says otherwise. Two allreduces of half as many
bytes take longer than one of these; one of twice as many saves hardly any time
(docs/performance.md)."""
_MOST_NBYTES = 2**62
_PATIENCE_S = 5.0
"""Seconds that a rank leaving by an exception waits for the others to leave, too."""


class Fusion:
    """The service ``comm.fusion``: the buckets of a communicator.

    It is a route of calls (``calls/routes.py``), for arrays of the host and of devices.
    """

    asked_by: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        group: Channel,
        devices: DeviceCollectives,
        *,
        choose: Callable[[Call, Bound], Candidate],
        plan: Callable[[Call, Bound], Any],
        may_compress: Callable[[], bool],
        take_place: Callable[[Exception], None],
    ) -> None:
        """Open no context yet; local.

        Args:
            group: the ranks whose calls go together.
            devices: what runs collectives on arrays on devices.
            choose: returns what runs a call by itself, or raises UsageError.
            plan: returns the plan of such a call on host arrays.
            may_compress: whether a table's rules may compress. They go by a length that
                a bucket would hide, so there are no buckets of host arrays then.
            take_place: refuses the next operation, whatever it is.
        """
        self.group, self.devices = group, devices
        self.choose, self._plan = choose, plan
        self._may_compress = may_compress
        self.count = LostCount(group, take_place)
        """Knows whether this rank has lost count of others' buckets."""
        self.context: Fused | None = None
        """The one that is open."""
        self.is_open = False
        """True while a context is open."""
        # The group has both: they end together.
        self.buckets = DeviceBuckets(group, devices, weakref.proxy(self))
        """Buckets of arrays on devices."""
        devices.users.append(self)

    def fused(
        self, *, nbytes: int = DEFAULT_NBYTES, time_limit_s: float | None = None
    ) -> Fused:
        """Return a context in which short nonblocking allreduces go together.

            with comm.fused():
                requests = [comm.allreduce(g, nonblocking=True) for g in gradients]
            commrt.wait_all(requests)

        Calls of ``allreduce(..., nonblocking=True)`` shorter than ``nbytes`` are
        collected in buckets, one for each element type and reduction, and are sent as
        one allreduce of all their elements, out of the arrays and into them; on each
        device one that comes after what the calls' streams held. Everything else runs
        as ever, after what was called before it. Arguments mean the same as outside,
        and so do requests.

        All buckets are sent when they hold ``nbytes``, before any other collective of
        this communicator, and at the end of the context. Without ``time_limit_s`` also
        when a request is waited for or tested: ranks must do that after the same calls,
        and not wait in between for anything else that follows from a bucket's
        operations. With it, also once the first call is so old, and the ranks agree how
        many calls are sent: they may wait for requests in any order, at any time.
        Leaving the context then waits until all ranks have made the same calls.

        Collective: all ranks make equal calls within, with equal arguments here.

        Args:
            nbytes: what the buckets hold together; longer calls run by themselves.
            time_limit_s: how long a call may wait for others; looked at in every call
                and wait of this process.

        Raises:
            UsageError: an argument is wrong, or a context is open already.
        """
        self.group.check_usable()
        limit = as_integer(nbytes)
        if limit is None or not 1 <= limit <= _MOST_NBYTES:
            raise UsageError(
                f"fused: nbytes={shown(nbytes)} must be a number of bytes, an integer "
                f"in 1..{_MOST_NBYTES}"
            )
        if time_limit_s is not None:
            try:
                time_limit_s = check_timeout("fused", time_limit_s)
            except UsageError:
                raise UsageError(
                    f"fused: time_limit_s={shown(time_limit_s)} must be a number of "
                    "seconds above 0, or None"
                ) from None
            if math.isinf(time_limit_s):
                time_limit_s = None
        return Fused(self, limit, time_limit_s)

    @property
    def nbytes(self) -> int | None:
        """Bytes that the buckets of the open context hold; None: none is open."""
        context = self.context
        return None if context is None else context.nbytes

    def enter(self, context: Fused) -> None:
        """Let calls go into the buckets of a context."""
        self.context, self.is_open = context, True

    def leave(self) -> None:
        """Let calls go by themselves again."""
        self.context, self.is_open = None, False

    # -- a route of calls --------------------------------------------------------

    def again(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FusedDeviceRequest | None:
        """Return the request of a call whose like is known; None for all others."""
        if self.context is None or kwargs.get("nonblocking") is not True:
            return None
        return self.buckets.again(name, args, kwargs)

    def prepare(self, call: Call, bound: Bound) -> Callable[[], Any] | None:
        """Put a call into a bucket; return what returns its request.

        None where the call has to run by itself.
        """
        if not self._takes(call, bound):
            return None
        request = (self.fuse if bound.on is None else self.fuse_on_device)(call, bound)
        return None if request is None else lambda: request

    def bind(self, call: Call, bound: Bound) -> None:
        """Return None: a persistent call runs by itself."""

    def _takes(self, call: Call, bound: Bound) -> bool:
        """Return whether a call goes into a bucket, as far as its arguments say."""
        context = self.context
        if context is None or runs_on_host(call) or not context.takes(call, bound):
            return False
        if bound.on is not None:
            return True
        is_on_host = bound.device is None and call.stream is None
        return is_on_host and not self._may_compress()

    def fuse(self, call: Call, bound: Bound) -> _native.FusedRequest | None:
        """Return the request of a call on host arrays; None: it runs by itself."""
        group, x, out, most = self.group, bound.x, bound.out, self.nbytes
        if most is None:
            return None
        assert x is not None
        assert out is not None
        self.refuse_what_no_bucket_runs(call, bound, most)
        if group.checker is not None:
            group.checker.check(call, bound)
        request: _native.FusedRequest | None = _native.fuse(
            group,
            x.address,
            out.address,
            x.count,
            bound.dtype.code,
            int(call.reduction),
            x.owner,
            out.owner,
            bound.result,
            group.timeout_s if call.timeout_s is None else call.timeout_s,
        )
        return request

    def fuse_on_device(self, call: Call, bound: Bound) -> FusedDeviceRequest | None:
        """Return the request of a call on device arrays; None: it runs by itself."""
        most = self.nbytes
        if most is None:
            return None
        try:
            return self.buckets.add(call, bound, most)
        except CaptureError as error:
            raise self.devices.why_not_started(call.spec.name, error) from None

    def refuse_what_no_bucket_runs(self, call: Call, bound: Bound, most: int) -> None:
        """Raise UsageError where nothing can run the call, in whatever company.

        The algorithm of a bucket is chosen by its length, which is not known yet.
        """
        try:
            self.choose(call, bound)
        except UsageError:
            full = max(bound.num_elements, most // bound.dtype.itemsize)
            self.choose(call, replace(bound, num_elements=full))

    def would_take(self, x: HostView) -> bool:
        """Return whether a short nonblocking sum of this array goes into a bucket."""
        most = self.nbytes
        if most is None or x.nbytes >= most:
            return False
        return x.on is not None or not self._may_compress()

    def refuse_in_bucket(self, x: HostView, op: Any, error: Exception) -> None:
        """Give a refused call its place in this rank's bucket, as others have theirs.

        The bucket is refused in turn, with the other calls in it: so all ranks go on
        with the same buckets. Where the reduction is what is wrong, nobody knows which
        bucket it is: then nothing more is delivered in the context.
        """
        has_place = False
        with contextlib.suppress(UsageError):
            reduction = ReduceOp.SUM if op is None else reduce_op(op)
            why = str(error).encode(errors="backslashreplace").decode()
            lane = None if x.on is None else self.buckets.lane_of(x.on)
            has_place = _native.fuse_refused(
                self.group, lane, x.count, x.dtype.code, int(reduction), why
            )
        if not has_place:
            self.refuse(error)

    def refuse_bucket(self, why: str) -> RefusedError:
        """Refuse a bucket's operation; return its calls' error. C++ calls this.

        ``why``: of the call in it that was refused here.
        """
        self.group.refuse(UsageError(why))
        return RefusedError(
            f"allreduce, rank {self.group.rank}: this rank has refused a call of the "
            f"same bucket of fused(), and nothing was delivered: {why}"
        )

    def refuse(self, error: Exception) -> None:
        """Lose count of the buckets: nobody knows in which one others have a call."""
        agreement = self._agreement
        if agreement is None:
            self.count.refuse(error)
        else:
            agreement.refuse(str(error))

    @property
    def is_lost(self) -> bool:
        """True if nothing in the open context is delivered any more."""
        return self.count.is_lost

    def raise_lost(self) -> None:
        """Raise the error of a call then; C++ calls this."""
        raise self.count.error()

    # -- sending -----------------------------------------------------------------

    def cut(self) -> None:
        """Send the open buckets."""
        _native.cut_fusion(self.group)

    def make_way(self) -> None:
        """Send the open buckets before a collective that is in none of them."""
        _native.make_way_in_fusion(self.group)

    def have_sent(self, call: int, seconds: float) -> None:
        """Send a call, or wait so long for the ranks to agree that it may be sent."""
        if self.is_lost or self._agreement is None:
            self.cut()
        else:
            self.await_cut(call, seconds)

    def plan_bucket(self, count: int, dtype: int, reduction: int) -> Any:
        """Return the plan of an ordinary allreduce; the C++ part calls this.

        Return the error if nothing can run it: all ranks have the same, and send none.
        """
        kind = DTYPES[dtype]
        array = HostView(None, None, 0, count, kind, (count,), True)
        call, bound = allreduce_in_place(array, ReduceOp(reduction))
        try:
            return self._plan(call, bound)
        except UsageError:
            try:
                self.choose(call, bound)
            except UsageError as error:
                return error
            raise

    # With a time limit, the C++ part calls these.

    def bucket_full(self) -> None:
        """Send the open buckets if the ranks agree that they may be."""
        agreement = self._agreement
        if agreement is not None:
            agreement.look()

    def cut_bucket(self) -> None:
        """Send the open buckets, as soon as the ranks agree."""
        agreement = self._agreement
        if agreement is not None:
            agreement.drain()

    def await_cut(self, call: int, seconds: float) -> None:
        """Look whether ``call`` may be sent, for so long."""
        agreement = self._agreement
        if self.is_lost:
            self.cut()
        elif agreement is not None:
            agreement.wait_for(call, seconds)

    @property
    def _agreement(self) -> Agreement | None:
        context = self.context
        return None if context is None else context.agreement

    # -- what it has on devices --------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Buckets on devices that the host has not seen the end of."""
        return self.buckets.outstanding

    def close_on_devices(self) -> Sequence[FailedBuckets]:
        """Give streams and memory back; return what is to be given back later."""
        return self.buckets.close()


class Fused:
    """An open ``comm.fused()``."""

    agreement: Agreement | None = None
    """Agreement with the other ranks on the place to cut; None without a time limit."""

    def __init__(self, fusion: Fusion, nbytes: int, time_limit_s: float | None) -> None:
        self._fusion = fusion
        self.nbytes = nbytes
        """Most bytes in all buckets together."""
        self.time_limit_s = time_limit_s
        """Longest time that a call may wait for others, in seconds; None: no limit,
        something else sends the bucket."""
        self._entered = False

    def takes(self, call: Call, bound: Bound) -> bool:
        """Return whether a call goes into a bucket."""
        asked = call.algorithm, call.backend, call.factor, call.user, call.params
        return (
            call.spec.fuses
            and call.nonblocking
            and all(each is None for each in asked)
            and bound.x is not None
            and bound.out is not None
            and bound.x.nbytes < self.nbytes
        )

    def __enter__(self) -> Fused:
        comm = self._fusion.group
        comm.check_usable()
        if self._fusion.context is not None or self._entered:
            raise UsageError(
                f"fused: a context of {comm.name} is open already, or this one was "
                f"used before; leave it, or call comm.fused() again"
            )
        self._entered = True
        if self.time_limit_s is not None:
            kind = Follower if comm.rank else Leader
            self.agreement = kind(comm, self._fusion.count)
        limit = math.inf if self.time_limit_s is None else self.time_limit_s
        _native.open_fusion(comm, self.nbytes, limit)
        self._fusion.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        comm = self._fusion.group
        if os.getpid() != comm.pid:  # forked inside: the calls are the parent's
            self._fusion.leave()
            return
        try:
            if self.agreement is None:
                self._fusion.cut()
            elif error is None:
                self.agreement.leave(comm.timeout_s, None)
            else:
                # It may be this rank's alone; it goes on, whatever the others do.
                with contextlib.suppress(CommError):
                    self.agreement.leave(min(_PATIENCE_S, comm.timeout_s), error)
        finally:
            _native.close_fusion(comm)
            self._fusion.leave()
            if self._fusion.is_lost:
                self._fusion.count.regain()

    def send(self) -> None:
        """Send the open buckets now; collective, after the same calls on all ranks."""
        if self._fusion.context is not self:
            raise UsageError(
                f"fused: send() outside of the context on {self._fusion.group.name}, "
                f"which has ended; call it within `with comm.fused():`"
            )
        self._fusion.cut()
