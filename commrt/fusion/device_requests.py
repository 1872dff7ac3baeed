# SPDX-License-Identifier: Apache-2.0
"""Requests of calls on device arrays within ``comm.fused()``, and of their buckets."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from commrt import _native
from commrt.arrays.device import as_stream, current_stream_of
from commrt.errors import (
    CaptureError,
    CommError,
    DeviceError,
    TimeoutError_,
    UsageError,
)
from commrt.fusion.device_copies import Block, BucketCopies, Part, PooledEvent
from commrt.group.group import Group
from commrt.vocabulary.limits import check_timeout, deadline_after
from commrt.vocabulary.request import Request

__all__ = ["FusedDeviceRequest", "SentBucket"]


class SentBucket:
    """Calls that went as one: a collective on a block, and what goes back from it."""

    def __init__(
        self,
        engine: _native.Engine,
        copies: BucketCopies,
        request: _native.DeviceRequest,
        parts: Sequence[Part],
        block: Block,
    ) -> None:
        self.request = request
        """Request of the collective."""
        self._engine, self._copies, self._block = engine, copies, block
        self._arrays = [(each.x, each.out) for each in parts]
        """Arrays of the bucket's calls, kept until its end: streams work on them."""
        self._end: PooledEvent | None = None
        self._claims = [None]
        self._is_over = False

    def put_back(self) -> None:
        """Copy the results to their arrays, behind the collective; idempotent.

        Where streams have no flags this blocks until the host has done its part. Raises
        the collective's error.
        """
        while self._end is None and not self._is_over:
            try:
                self._claims.pop()
            except IndexError:  # another thread does it
                self._copies.device.pause()
                continue
            try:
                self._put_back()
            finally:
                self._claims.append(None)

    def _put_back(self) -> None:
        if self._end is not None:
            return
        copies = self._copies
        with copies.outside_captures():
            self._follow_collective()
            outs = [out for _, out in self._arrays]
            self._end = self._block.end = copies.put_back(outs, self._block)

    @property
    def arrays(self) -> list[Any]:
        """The arrays of its calls, as long as somebody works on them."""
        return self._arrays

    @property
    def is_followed(self) -> bool:
        """True if a stream was told to wait for the collective, before any failure."""
        return self._end is not None and self.failure is None

    @property
    def is_whole(self) -> bool:
        """True if the collective is done, and has not failed."""
        return self.request.done and self.failure is None

    def _follow_collective(self) -> None:
        self.request.wait(stream=self._copies.puts_back)

    @property
    def failure(self) -> CommError | None:
        """Error with which the collective has failed, as far as the host has seen."""
        if not self.request.done:
            return None
        try:
            self.request.test()
        except CommError as error:
            return error
        return None

    def check(self) -> None:
        """Raise the collective's error if it has failed by now."""
        failure = self.failure
        if failure is not None:
            raise failure

    def wait_on(self, stream: int) -> None:
        """Let a stream wait for the end; raises the collective's error."""
        self.check()
        self.put_back()
        if self._end is not None:
            self._copies.device.stream_wait_event(stream, self._end.handle)
        self.check()

    def test(self) -> bool:
        """Run a little progress; True once all is done. Raises the error."""
        if not self.request.test():
            return False
        self.put_back()
        return self.has_ended()

    def synchronize(self, limit_s: float) -> bool:
        """Block the host until all is done; False where its last part takes longer."""
        deadline = deadline_after(limit_s)
        self.request.synchronize(timeout_s=limit_s)
        self.put_back()
        engine, device = self._engine, self._copies.device
        while not self.has_ended():
            if time.monotonic() > deadline:
                return False
            if not engine.step():
                device.pause()
        return True

    def has_ended(self) -> bool:
        """Return whether the device has done it; then the arrays are let go.

        Also after a failure: streams that were let go may still write to them.
        """
        if self._is_over:
            return True
        if not self.request.done:
            return False
        try:
            if self._end is None and not self._settle_end():
                return False
            over = self._end is None or self._copies.has_come(self._end)
        except DeviceError:  # a device that failed does nothing any more
            over = True
        if over:
            self._is_over = True
            self._arrays = []
        return over

    def _settle_end(self) -> bool:
        """Put back what the host has not got to yet; False where that did not work."""
        try:
            self.put_back()
        except CommError:
            if self.failure is None:
                return False
            copies = self._copies  # nothing is put back, and inputs may still be read
            self._end = copies.note(copies.gathers.handle)
        return True


class FusedDeviceRequest(Request):
    """One call on device arrays that went into a bucket."""

    def __init__(
        self,
        comm: Group,
        have_sent: Callable[[int, float], None],
        part: Part,
        result: Any,
        timeout_s: float,
    ) -> None:
        """``have_sent`` sends a call, or waits so many seconds for the ranks to agree.

        It knows calls by their numbers in the context.
        """
        self._comm, self._have_sent = comm, have_sent
        self._result, self._array = result, part.x.array
        self._on, self._stream = part.x.on, part.stream
        self._timeout_s = timeout_s
        self.part: Part | None = part
        """Its arrays, as long as the bucket is open."""
        self.number = 0
        """Number of calls in this context."""
        self._sent: SentBucket | None = None
        self._error: BaseException | None = None
        self._observed = False

    # Methods for the bucket, called by whoever sends it.

    def went_with(self, bucket: SentBucket) -> None:
        """Say that the bucket was sent."""
        self._sent, self.part = bucket, None

    def failed_by(self, error: BaseException) -> None:
        """Say that the bucket will never be sent."""
        if self._sent is None:
            self._error, self.part = error, None

    def _send(self, limit_s: float) -> bool:
        """Have the bucket sent; False where the ranks do not agree within the limit."""
        comm, deadline = self._comm, deadline_after(limit_s)
        while self._sent is None and self._error is None:
            comm.check_process()
            self._have_sent(self.number, max(0.0, deadline - time.monotonic()))
            if self._sent is not None or self._error is not None:
                break
            if time.monotonic() >= deadline:
                return False
            os.sched_yield()  # another thread is sending it
        if self._error is not None:
            self._observed = True
            raise self._error
        return True

    def _bucket(self, limit_s: float) -> SentBucket:
        """Return the bucket, sent; TimeoutError_ where the ranks do not agree."""
        if not self._send(limit_s):
            seq, why = self._comm.next_seq, "not all ranks have made this call"
            self._comm.timed_out(self._what, seq, limit_s, why, self)
        assert self._sent is not None
        return self._sent

    # Methods for the caller.

    def wait(self, *, stream: Any = None, timeout_s: float | None = None) -> Any:
        """Send the bucket, let a stream wait for its end, and return the output.

        ``stream`` is the current one of the array's library by itself. The host is not
        blocked; but with a time limit until the ranks agree to send the bucket.
        Idempotent; raises the operation's error if it has failed by now.
        """
        if timeout_s is not None:
            raise UsageError(
                f"{self._what}: wait() does not block the host, so timeout_s= belongs "
                f"to synchronize(timeout_s=...)"
            )
        self._comm.check_process()
        if stream is None:
            handle = current_stream_of(self._array, self._on)
        else:
            handle = as_stream(stream, self._on, self._what)
        if self._on.is_capturing(handle):
            raise CaptureError(
                f"wait() for {self._what}: stream {handle} is being captured, and the "
                f"operation was started outside of the capture: a graph cannot wait "
                f"for it. Wait before the capture begins; nothing was given to the "
                f"device",
                "capturing",
            )
        self._observed = True
        self._bucket(self._timeout_s).wait_on(handle)
        return self._result

    def synchronize(self, *, timeout_s: float | None = None) -> Any:
        """Send the bucket, and block the host until it is complete; return the output.

        It raises the same errors as any request; see ``wait``.
        """
        self._comm.check_process()
        limit_s = self._timeout_s
        if timeout_s is not None:
            limit_s = check_timeout(self._what, timeout_s)
        self._observed = True
        deadline = deadline_after(limit_s)
        bucket = self._bucket(limit_s)
        try:
            done = bucket.synchronize(max(1e-3, deadline - time.monotonic()))
        except TimeoutError_ as error:
            if error.request is bucket.request:
                error.request = self
            raise
        if not done:
            why = "the ranks are done, and the device has not put back its parts"
            self._comm.timed_out(self._what, bucket.request.seq, limit_s, why, self)
        return self._result

    def test(self) -> bool:
        """Send the bucket, and run a little progress; True once complete."""
        self._comm.check_process()
        try:
            done = self._send(0.0) and self._sent is not None and self._sent.test()
        except CommError:
            self._observed = True
            raise
        self._observed = self._observed or done
        return done

    def be_quiet(self) -> None:
        """Do not warn where it is dropped."""
        self._observed = True

    @property
    def done(self) -> bool:
        """True once the bucket is done or has failed; makes no progress."""
        if self._sent is None:
            return self._error is not None
        return self._sent.failure is not None or self._sent.has_ended()

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return "allreduce"

    @property
    def seq(self) -> int:
        """Sequence number of its bucket; -1 while that is open."""
        return -1 if self._sent is None else self._sent.request.seq

    @property
    def timeout_s(self) -> float:
        """Default limit of ``synchronize``, in seconds."""
        return self._timeout_s

    @property
    def device(self) -> int:
        """Number of the device of its arrays."""
        return int(getattr(self._on, "ordinal", 0))

    @property
    def stream(self) -> int:
        """Stream that it was ordered after, as an integer."""
        return self._stream

    @property
    def _what(self) -> str:
        if self._sent is None:
            return f"allreduce in an open bucket on {self._comm.name}"
        return f"allreduce #{self.seq} on {self._comm.name}"

    def __repr__(self) -> str:
        sent = self._sent
        failed = self._error is not None or (sent is not None and sent.failure)
        state = "failed" if failed else "done" if self.done else "pending"
        return f"<commrt.FusedDeviceRequest {self._what}: {state}>"

    def __del__(self) -> None:
        if getattr(self, "_observed", True) or os.getpid() != self._comm.pid:
            return
        warnings.warn(
            f"{self._what} was dropped without wait(): no stream waits for it, its "
            f"arrays stay alive until it ends, and its errors are lost",
            ResourceWarning,
            stacklevel=2,
        )
