# SPDX-License-Identifier: Apache-2.0
"""Requests of calls on arrays on devices, and the errors that they raise.

``DeviceRequest`` itself is written in C++; it calls the functions here to make errors.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from commrt._native import DeviceRequest
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

__all__ = [
    "DeviceMessageRequest",
    "DeviceRequest",
    "failed",
    "late",
    "not_blocking",
    "not_running",
    "not_waiting",
]


def not_blocking(what: str) -> UsageError:
    """Return the error of a wait with a limit."""
    return UsageError(
        f"{what}: wait() does not block the host, so timeout_s= belongs to "
        f"synchronize(timeout_s=...)"
    )


def not_waiting(what: str, error: Exception) -> Exception:
    """Return what a wait says that a stream was not given."""
    if isinstance(error, CaptureError):
        return CaptureError(f"wait() for {what}: {error}", error.status)
    return error


def not_running(what: str, method: str) -> CaptureError:
    """Return the error of a method that asks a captured call for its end."""
    return CaptureError(
        f"{method}() for {what}: it was captured into a graph, and runs as often as "
        f"that is launched: synchronize the stream that it is launched into",
        "capturing",
    )


def late(request: DeviceRequest, limit_s: float) -> TimeoutError_:
    """Return the error of a synchronize that ran out of time."""
    error = TimeoutError_(
        f"{request.title}, rank {request.comm.rank}: not complete within {limit_s:g} "
        f"s: {request.waits_for()}; it stays in flight: synchronize() for it again "
        f"(the request is in the error's .request)"
    )
    error.request = request
    told: TimeoutError_ = request.comm.with_ranks(error)
    return told


def failed(request: DeviceRequest, kind: str, text: str) -> Exception:
    """Return the error of a call that failed; ``kind`` and ``text`` are its own."""
    own: Exception | None = getattr(request, "own_error", None)
    if own is not None:  # of what the host does in Python
        return own
    comm = request.comm
    where = f"{request.title}, rank {comm.rank}"
    if kind == "timeout":
        told: Exception = comm.with_ranks(
            TimeoutError_(
                f"{where}: not complete within {request.timeout_s:g} s: "
                f"{request.waits_for()}; its streams were let go, its output is worth "
                f"nothing, and {comm.name} cannot be used any more"
            )
        )
        return told
    if kind == "peer":
        return PeerFailedError(f"{where}: {text}")
    if kind.startswith("device:"):
        status = kind.removeprefix("device:")
        known = {"failed": DeviceFailedError, "deadlock": OrderingError}
        return known.get(status, DeviceError)(f"{where}: {text}", status)
    error: Exception = comm.operation_error(request.title, text, kind)
    return error


class DeviceMessageRequest(DeviceRequest):
    """One started call of messages on arrays on a device.

    If messages only leave, ``wait()`` lets a stream wait for the copy to the host. From
    then on the array may be changed. ``synchronize()`` waits until the messages have
    left. ``wait()``, ``test()`` and ``synchronize()`` give incoming messages to the
    device.
    """

    def __init__(self, *arguments: Any, peers: tuple[int, ...]) -> None:
        super().__init__(*arguments)
        self._peers = peers

    @property
    def received_nbytes(self) -> int:
        """Bytes received so far; -1 where nothing is to be."""
        return sum(self.call.received_nbytes) if self._peers else -1

    @property
    def each_received_nbytes(self) -> list[int]:
        """The same for each receive."""
        return list(self.call.received_nbytes)

    @property
    def source(self) -> int:
        """The rank that a message came from; -1 before, and where several may."""
        came = self.call.ended and self.call.failure is None
        return self._peers[0] if came and len(self._peers) == 1 else -1

    def waits_for(self) -> str:
        return self.call.waits_for or "its copies are under way on the device"

    def __del__(self) -> None:
        with suppress(CommError, AttributeError):
            self.call.let_be()
