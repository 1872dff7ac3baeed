# SPDX-License-Identifier: Apache-2.0
"""Every exception commrt raises.

CommError
├── UsageError (ValueError)        a wrong argument or call; nothing was sent
│   ├── BufferError_ (TypeError)   an array commrt cannot communicate from or into
│   ├── NotFiniteError             an array has NaN or infinity, and is checked for it
│   └── ClosedError                the communicator or request is gone
├── MismatchError                  ranks called different things (check mode)
├── TimeoutError_ (TimeoutError)   an operation did not finish in time
├── PeerFailedError                a peer died
├── IntegrityError                 a message was damaged on its way (checksums)
├── ChangedInFlightError           an array was written to while a call sent it
├── RevokedError                   the communicator failed earlier
├── ReductionError                 a reduction of the user's own raised something
├── TruncationError                a message was longer than its receive buffer
├── ObjectError                    an object that came could not be unpickled
├── BackendError (RuntimeError)    a backend or library is missing or failed
│   ├── MemoryError_ (MemoryError) there is no memory for a call's result
│   └── DeviceError                a device, or a call of its driver, failed
│       ├── DeviceMissingError     no driver, no device, or one too old
│       ├── KernelsMissingError    nothing can compile commrt's GPU kernels
│       ├── DeviceFailedError      the device failed earlier; so do all later calls
│       ├── CaptureError           not allowed while a stream is captured
│       └── OrderingError          a simulated device found a race or a deadlock
├── TableError (ValueError)        a selection table is malformed or foreign
└── ScheduleError (ValueError)     a schedule is wrong; raised by the verifier
"""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "BackendError",
    "BufferError_",
    "CaptureError",
    "ChangedInFlightError",
    "ClosedError",
    "CommError",
    "DeviceError",
    "DeviceFailedError",
    "DeviceMissingError",
    "IntegrityError",
    "KernelsMissingError",
    "MemoryError_",
    "MismatchError",
    "NotFiniteError",
    "ObjectError",
    "OrderingError",
    "PeerFailedError",
    "RecoveryError",
    "ReductionError",
    "RefusedError",
    "RevokedError",
    "ScheduleError",
    "TableError",
    "TimeoutError_",
    "TruncationError",
    "UsageError",
    "shown",
    "suggest",
]

_MOST_SHOWN = 200
"""Characters of a value in a message."""


class CommError(Exception):
    """Base of every error raised by commrt."""

    on_all_ranks: bool = False
    """True if commrt knows that every rank raises it, so none has to be told."""
    is_told: bool = False
    """True if this rank has told the others of it."""


class UsageError(CommError, ValueError):
    """An argument or a call is wrong. Nothing was sent; the call may be retried."""


class BufferError_(UsageError, TypeError):
    """The array is of a kind, layout or type that cannot be communicated."""


class NotFiniteError(UsageError):
    """An array to be sent has NaN or infinity, and its communicator looks for them."""


class ClosedError(UsageError):
    """The communicator was freed, or the process forked after it was created."""


class MismatchError(CommError):
    """Ranks called different operations; every rank raises the same text."""


class RefusedError(MismatchError):
    """Another rank's call was refused, so this operation did not happen anywhere.

    The text has that rank and the reason. The communicator can be used: all ranks are
    in step for their next call; of a message, both of its ends.
    """

    on_all_ranks = True
    made: Any = None
    """Where the program had not asked for the end of that operation on a device: the
    request or the output of the call that raises this, which has been made; or None."""


class TimeoutError_(CommError, builtins.TimeoutError):
    """An operation did not finish within ``timeout_s``."""

    request: Any = None
    """The request, which stays in flight and can be waited for again; or None."""
    ranks: tuple[Any, ...] = ()
    """The state of each rank of the communicator then, as a ``RankState`` of
    ``commrt.group.rank_states``; empty for errors of other waits than those for an
    operation."""


class PeerFailedError(CommError):
    """A peer process died."""


class IntegrityError(CommError):
    """A message did not fit its checksum: all ranks of the operation raise it."""


class ChangedInFlightError(CommError):
    """The program wrote to an array while a nonblocking call sent it (check mode).

    Other ranks may have got what it held before, or after, or some of both.
    """


class RevokedError(CommError):
    """The communicator failed in an earlier operation and must be replaced."""


class RecoveryError(CommError):
    """The ranks that live cannot go on, or not with this rank."""


class ReductionError(CommError):
    """A reduction of the user's own failed; its exception is the cause."""


class TruncationError(CommError):
    """A message was longer than the buffer that was to receive it."""


class ObjectError(CommError):
    """An object that came could not be unpickled here; the exception is the cause."""


class BackendError(CommError, RuntimeError):
    """A backend, or a library that it needs, is missing or failed."""


class MemoryError_(BackendError, builtins.MemoryError):
    """There is no memory for an array that a call returns. Nothing was sent."""


class DeviceError(BackendError):
    """A device, or a call of its driver, failed; ``status`` is the kind of failure."""

    def __init__(self, message: str, status: str = "failed") -> None:
        super().__init__(message)
        self.status = status


class DeviceMissingError(DeviceError):
    """There is no driver, no such device, or the driver is too old."""


class KernelsMissingError(DeviceError):
    """commrt's GPU kernels cannot be compiled: NVRTC is missing, or does not fit."""

    def __init__(self, message: str, status: str = "no_kernels") -> None:
        super().__init__(message, status)


class DeviceFailedError(DeviceError):
    """The device failed earlier, as by a wrong kernel: every later call fails, too."""


class CaptureError(DeviceError):
    """The call is not allowed while a stream is captured; the capture may be lost."""


class OrderingError(DeviceError):
    """A simulated device found a race, or that nothing can go on."""


class TableError(CommError, ValueError):
    """A selection table is malformed, hostile, or made for another machine."""


class ScheduleError(CommError, ValueError):
    """A schedule is not well-formed, can deadlock, races, or computes wrongly.

    Attributes:
        places: rank and step of the steps that the message is about, where it is about
            some. Step -1: the rank's program as a whole.
    """

    def __init__(self, message: str, places: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.places = tuple(places)


def shown(value: object) -> str:
    """Return a value as messages show it: as ``repr`` does, shortened where it is long.

    Whatever a program passes, a message about it can be written.
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of an object of the program
        if isinstance(value, int):  # Python writes only so many digits
            return f"<an integer of {value.bit_length()} bits>"
        return f"<a {type(value).__name__} that cannot be shown>"
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def suggest(
    word: object, known: Iterable[str], also: Mapping[str, str] | None = None
) -> str:
    """Return the tail of a message about an unknown name: guesses, then all names.

    Args:
        word: what was given; anything but a string is told that a name is expected.
        known: the names there are.
        also: names that other libraries have for some of them.
    """
    names = sorted(known)
    if not names:
        return ""
    listed = f"Known: {', '.join(names)}."
    if not isinstance(word, str):
        return f": expected a name. {listed}"
    guess = (also or {}).get(word.lower())
    lower = {name.lower(): name for name in names}
    if guess not in names:
        close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
        guess = lower[close[0]] if close else None
    hint = "." if guess is None else f"; did you mean {guess!r}?"
    return f"{hint} {listed}"
