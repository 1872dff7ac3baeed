# SPDX-License-Identifier: Apache-2.0
"""Fusion: ``with comm.fused():`` sends short allreduces together.

The native side (``calls/fusion.cpp``) collects the calls in buckets. Where it cuts,
that is, sends what it has, must be the same on all ranks. Without a time limit that
follows from the calls. With one the ranks agree (``fusion/agreement.py``).
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from commrt import _native
from commrt.arrays.host import HostView
from commrt.calls.arguments import Bound, Call, allreduce_in_place
from commrt.compression.methods import Compressing
from commrt.errors import CommError, UsageError
from commrt.fusion.agreement import Agreement, Follower, Leader
from commrt.vocabulary.checks import as_integer, check_timeout
from commrt.vocabulary.dtypes import DTYPES, ReduceOp

if TYPE_CHECKING:
    from commrt.calls.check_mode import Checker
    from commrt.device_calls.collectives import Staging
    from commrt.fusion.device_requests import FusedDeviceRequest

__all__ = ["DEFAULT_NBYTES", "Fused", "Fusing"]

DEFAULT_NBYTES = 4 * 1024 * 1024
"""What buckets hold unless told otherwise. Two allreduces of half as many bytes take
longer than one of these, one of twice as many hardly less (docs/performance.md)."""
_PATIENCE_S = 5.0
"""How long a rank that leaves by an exception waits for the others to leave, too."""


class Fusing(Compressing):
    """The part of a communicator that has ``fused()``."""

    _fused: Fused | None = None
    checker: Checker | None
    devices: Staging

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
        self.check_usable()
        limit = as_integer(nbytes)
        if limit is None or limit < 1:
            raise UsageError(
                f"fused: nbytes={nbytes!r} must be a number of bytes, an integer from 1"
            )
        if time_limit_s is not None:
            try:
                time_limit_s = check_timeout("fused", time_limit_s)
            except UsageError:
                raise UsageError(
                    f"fused: time_limit_s={time_limit_s!r} must be a number of seconds "
                    f"above 0, or None"
                ) from None
            if math.isinf(time_limit_s):
                time_limit_s = None
        return Fused(self, limit, time_limit_s)

    def _fuse(self, call: Call, bound: Bound) -> Any:
        """Return the request of a call that goes into a bucket, else None."""
        x, out = bound.x, bound.out
        if self._fused is None or not self._fused.takes(call, bound):
            return None
        assert x is not None
        assert out is not None
        self._refuse_what_no_bucket_runs(call, bound, self._fused.nbytes)
        if self.checker is not None:
            self.checker.check(call, bound)
        return _native.fuse(
            self,
            x.address,
            out.address,
            x.count,
            bound.dtype.code,
            int(call.reduction),
            x.owner,
            out.owner,
            bound.result,
            self.timeout_s if call.timeout_s is None else call.timeout_s,
        )

    def _fuse_on_device(self, call: Call, bound: Bound) -> FusedDeviceRequest | None:
        """The same for arrays on a device."""
        if (
            self._fused is None
            or bound.on is None
            or not self._fused.takes(call, bound)
        ):
            return None
        return self.devices.buckets.add(call, bound, self._fused.nbytes)

    def _cut_fused(self) -> None:
        """Send the open buckets before a collective that is in none of them."""
        if self._fused is not None:
            _native.cut_fusion(self)

    def _refuse_what_no_bucket_runs(self, call: Call, bound: Bound, most: int) -> None:
        """Raise UsageError where nothing can run the call, in whatever company.

        What runs a bucket is chosen by its length, which is not known yet.
        """
        try:
            self._choose(call, bound)
        except UsageError:
            full = max(bound.num_elements, most // bound.dtype.itemsize)
            self._choose(call, replace(bound, num_elements=full))

    def _plan_bucket(self, count: int, dtype: int, reduction: int) -> Any:
        """Return the plan of an ordinary allreduce; the native side calls this.

        Or the error, where nothing can run it: all ranks have the same, and send none.
        """
        kind = DTYPES[dtype]
        array = HostView(None, None, 0, count, kind, (count,), True)
        call, bound = allreduce_in_place(array, ReduceOp(reduction))
        try:
            return self._plan(call, bound)
        except UsageError:
            try:
                self._choose(call, bound)
            except UsageError as error:
                return error
            raise

    def _plan(self, call: Call, bound: Bound) -> Any:
        raise NotImplementedError

    def give_up(self, why: str) -> None:
        """Make the communicator unusable, here and for ranks of this node that wait."""
        raise NotImplementedError

    # With a time limit, the native side calls these.

    def _bucket_full(self) -> None:
        """Send the open buckets if the ranks agree that they may be."""
        if self._fused is not None and self._fused.agreement is not None:
            self._fused.agreement.look()

    def _cut_bucket(self) -> None:
        """Send the open buckets, as soon as the ranks agree."""
        if self._fused is not None and self._fused.agreement is not None:
            self._fused.agreement.drain()

    def _await_cut(self, call: int, seconds: float) -> None:
        """Look whether ``call`` may be sent, for so long."""
        if self._fused is not None and self._fused.agreement is not None:
            self._fused.agreement.wait_for(call, seconds)


class Fused:
    """An open ``comm.fused()``."""

    agreement: Agreement | None = None
    """With the other ranks, on where to cut; where there is a time limit."""

    def __init__(self, comm: Fusing, nbytes: int, time_limit_s: float | None) -> None:
        self._comm = comm
        self.nbytes = nbytes
        """What the buckets hold together."""
        self.time_limit_s = time_limit_s
        """How long a call may wait for others; None: until something else sends it."""
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
        comm = self._comm
        comm.check_usable()
        if comm._fused is not None or self._entered:
            raise UsageError(
                f"fused: a context of {comm.name} is open already, or this one was "
                f"used before; leave it, or call comm.fused() again"
            )
        self._entered = True
        if self.time_limit_s is not None:
            self.agreement = (Follower if comm.rank else Leader)(comm)
        limit = math.inf if self.time_limit_s is None else self.time_limit_s
        _native.open_fusion(comm, self.nbytes, limit)
        comm._fused = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        comm = self._comm
        if os.getpid() != comm.pid:  # forked inside: the calls are the parent's
            comm._fused = None
            return
        try:
            if self.agreement is None:
                _native.cut_fusion(comm)
            elif error is None:
                self.agreement.leave(comm.timeout_s, None)
            else:
                # It may be this rank's alone; it goes on, whatever the others do.
                with contextlib.suppress(CommError):
                    self.agreement.leave(min(_PATIENCE_S, comm.timeout_s), error)
        finally:
            _native.close_fusion(comm)
            comm._fused = None

    def send(self) -> None:
        """Send the open buckets now; collective, after the same calls on all ranks."""
        if self._comm._fused is not self:
            raise UsageError("fused: send() outside of the context; it is over")
        _native.cut_fusion(self._comm)
