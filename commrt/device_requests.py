# SPDX-License-Identifier: Apache-2.0
"""Requests of calls on arrays on devices."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from commrt.calls import check_timeout
from commrt.device_arrays import as_stream, current_stream_of
from commrt.errors import (
    CaptureError,
    CommError,
    DeviceError,
    DeviceFailedError,
    OrderingError,
    PeerFailedError,
    TimeoutError_,
    UsageError,
)

if TYPE_CHECKING:
    from commrt import _native
    from commrt.comm import Communicator

__all__ = ["DeviceMessageRequest", "DeviceRequest"]


class DeviceRequest:
    """One started call on arrays on a device; has the methods of ``Request``."""

    @property
    def received_nbytes(self) -> int:
        """Bytes that messages brought; -1 for other operations."""
        return -1

    @property
    def source(self) -> int:
        """The rank that a message came from; -1 for other operations."""
        return -1

    def __init__(
        self,
        comm: Communicator,
        call: _native.DeviceCall,
        result: Any,
        operation: str,
        timeout_s: float,
        device: Any,
        stream: int,
        array: Any,
    ) -> None:
        self._comm = comm
        self._call = call
        self._result = result
        self._operation = operation
        self._timeout_s = timeout_s
        self._on = device
        self._stream = stream
        self._array = array
        self._observed = False
        self._error: Exception | None = None

    def wait(self, *, stream: Any = None, timeout_s: float | None = None) -> Any:
        """Let a stream wait for the end, and return the output at once.

        ``stream`` is the current one of the array's library by itself. The host is not
        blocked: what is given to that stream from now on comes after the operation.
        Idempotent; raises the operation's error if it has failed by now.
        """
        if timeout_s is not None:
            raise UsageError(
                f"{self._what}: wait() does not block the host, so timeout_s= belongs "
                f"to synchronize(timeout_s=...)"
            )
        self._comm._check_process()
        self._raise()
        self._observed = True
        if stream is None:
            handle = current_stream_of(self._array, self._on)
        else:
            handle = as_stream(stream, self._on, self._what)
        try:
            self._call.wait_on(handle)
        except CaptureError as error:
            text = f"wait() for {self._what}: {error}"
            raise CaptureError(text, error.status) from None
        self._raise()
        return self._result

    def synchronize(self, *, timeout_s: float | None = None) -> Any:
        """Block the host until the operation is complete; return the output."""
        self._comm._check_process()
        self._observed = True
        self._check_runs("synchronize")
        limit = self._timeout_s
        if timeout_s is not None:
            limit = check_timeout(self._what, timeout_s)
        if not self._call.ended and not self._call.synchronize(limit):
            who = self._waits_for()
            error = TimeoutError_(
                f"{self._what}, rank {self._comm.rank}: not complete within {limit:g} "
                f"s: {who}; it stays in flight: synchronize() for it again (the "
                f"request is in the error's .request)"
            )
            error.request = self  # type: ignore[attr-defined]
            raise error
        self._raise()
        return self._result

    def test(self) -> bool:
        """Run a little progress; True once complete. Raises the operation's error."""
        self._comm._check_process()
        self._check_runs("test")
        if not self._call.test():
            return False
        self._observed = True
        self._raise()
        return True

    def _check_runs(self, method: str) -> None:
        if not self._call.is_captured:
            return
        raise CaptureError(
            f"{method}() for {self._what}: it was captured into a graph, and runs as "
            f"often as that is launched: synchronize the stream that it is launched "
            f"into",
            "capturing",
        )

    def be_quiet(self) -> None:
        """Do not warn where it is dropped."""
        self._observed = True

    @property
    def done(self) -> bool:
        """Whether the host has seen the end, without progress.

        Never of what was captured into a graph: nobody looks at its launches.
        """
        return self._call.ended

    @property
    def seq(self) -> int:
        """Sequence number of its first piece on the communicator."""
        return self._call.seq

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self._operation

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

    def _waits_for(self) -> str:
        return self._comm.who_is_missing(self.seq)

    @property
    def _what(self) -> str:
        return f"{self._operation} #{self.seq} on {self._comm.name}"

    def _raise(self) -> None:
        failure = self._call.failure
        if failure is None:
            return
        self._observed = True
        if self._error is None:
            self._error = self._failed(*failure)
        raise self._error

    def _failed(self, kind: str, text: str) -> Exception:
        where = f"{self._what}, rank {self._comm.rank}"
        if kind == "timeout":
            who = self._waits_for()
            return TimeoutError_(
                f"{where}: not complete within {self._timeout_s:g} s: {who}; its "
                f"streams were let go, its output is worth nothing, and "
                f"{self._comm.name} cannot be used any more"
            )
        if kind == "peer":
            return PeerFailedError(f"{where}: {text}")
        if kind.startswith("device:"):
            status = kind.removeprefix("device:")
            known = {"failed": DeviceFailedError, "deadlock": OrderingError}
            return known.get(status, DeviceError)(f"{where}: {text}", status)
        return self._comm._operation_error(self._what, text, kind)

    def __repr__(self) -> str:
        state = "captured" if self._call.is_captured else "pending"
        if self.done:
            state = "done" if self._call.failure is None else "failed"
        return f"<commrt.DeviceRequest {self._what}: {state}>"

    def __del__(self) -> None:
        if not getattr(self, "_observed", True):
            warnings.warn(
                f"{self._what} was dropped without wait(): no stream waits for it, its "
                f"arrays stay alive until it ends, and its errors are lost",
                ResourceWarning,
                stacklevel=2,
            )

    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth of a request is not its completion: call test() or wait() on "
            f"{self!r}"
        )


class DeviceMessageRequest(DeviceRequest):
    """One started call of messages on arrays on a device.

    Of what only leaves, ``wait()`` lets a stream wait for the copy to the host, from
    when on the array may be changed; ``synchronize()`` waits until it has left. What
    comes is given to the device by ``wait()``, ``test()`` and ``synchronize()``.
    """

    def __init__(self, *arguments: Any, peers: tuple[int, ...]) -> None:
        super().__init__(*arguments)
        self._peers = peers

    @property
    def received_nbytes(self) -> int:
        """Bytes received so far; -1 where nothing is to be."""
        return sum(self._call.received_nbytes) if self._peers else -1

    @property
    def each_received_nbytes(self) -> list[int]:
        """The same for each receive."""
        return list(self._call.received_nbytes)

    @property
    def source(self) -> int:
        """The rank that a message came from; -1 before, and where several may."""
        came = self._call.ended and self._call.failure is None
        return self._peers[0] if came and len(self._peers) == 1 else -1

    def _waits_for(self) -> str:
        return self._call.waits_for or "its copies are under way on the device"

    def __del__(self) -> None:
        super().__del__()
        with suppress(CommError, AttributeError):
            self._call.let_be()
