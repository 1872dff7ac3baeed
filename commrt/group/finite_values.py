# SPDX-License-Identifier: Apache-2.0
"""Looks for NaN and infinity in what a rank is about to send (COMMRT_NAN_CHECK).

An array on a device is copied to the host in its call's stream, piece by piece. So the
caller waits until the stream has come to the call. Nothing is looked at while a stream
is captured: the graph's values are not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from commrt import _native
from commrt.arrays.device import as_stream, current_stream_of
from commrt.arrays.host import HostView
from commrt.errors import NotFiniteError

__all__ = ["check_finite", "check_finite_on_stream", "not_finite"]

_COPIED_NBYTES = 4 << 20
_RELAXED = 2
"""The capture mode of calls that no other thread's capture is to end by."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...


class _Checked(_Named, Protocol):
    @property
    def nan_check(self) -> bool: ...


def check_finite(
    group: _Checked, what: str, view: HostView | None, argument: str = "x"
) -> None:
    """Raise NotFiniteError where a checking group would send NaN or infinity.

    Arrays on devices are not looked at: their calls are, once their stream is known.
    """
    if not group.nan_check or view is None or view.on is not None:
        return
    found = _native.first_not_finite(view.dtype.code, view.address, view.count)
    _raise_found(group, what, argument, view, found)


def check_finite_on_stream(
    group: _Checked,
    what: str,
    view: HostView | None,
    stream: Any = None,
    argument: str = "x",
) -> None:
    """Do the same for an array of any place, as a stream has it.

    ``stream``: the call's, as the caller gave it; None: the device's current one.
    """
    if not group.nan_check or view is None:
        return
    if view.on is None:
        check_finite(group, what, view, argument)
    elif view.count and view.dtype.kind in ("float", "complex"):
        _raise_found(group, what, argument, view, _first_on_device(what, view, stream))


def _first_on_device(what: str, view: HostView, stream: Any) -> tuple[int, bool]:
    """Return index and kind of the first such element in a device's array, or -1."""
    device, dtype = view.on, view.dtype
    if stream is None:
        handle = current_stream_of(view.array, device)
    else:
        handle = as_stream(stream, device, what)
    if device.is_capturing(handle):
        return -1, False
    most = _COPIED_NBYTES // dtype.itemsize
    nbytes = min(most, view.count) * dtype.itemsize
    with _relaxed(device), _pinned(device, nbytes) as at:
        for start in range(0, view.count, most):
            count = min(most, view.count - start)
            source = view.address + start * dtype.itemsize
            device.memcpy_async(at, source, count * dtype.itemsize, handle)
            device.stream_synchronize(handle)
            index, is_nan = _native.first_not_finite(dtype.code, at, count)
            if index >= 0:
                return start + index, is_nan
    return -1, False


@contextmanager
def _relaxed(device: Any) -> Iterator[None]:
    before = device.exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        device.exchange_capture_mode(before)


@contextmanager
def _pinned(device: Any, nbytes: int) -> Iterator[int]:
    at = device.pinned_alloc(nbytes)
    try:
        yield at
    finally:
        device.pinned_free(at)


def _raise_found(
    group: _Named, what: str, argument: str, view: HostView, found: tuple[int, bool]
) -> None:
    index, is_nan = found
    if index >= 0:
        where = (index, view.count)
        raise not_finite(group, what, argument, where, is_nan=is_nan)


def not_finite(
    group: _Named, what: str, argument: str, where: tuple[int, int], *, is_nan: bool
) -> NotFiniteError:
    """Return the error of an array; ``where`` is an index, and how many there are."""
    index, count = where
    value = "NaN" if is_nan else "infinity"
    return NotFiniteError(
        f"{what} on {group.name}, rank {group.rank}: {argument} has {value} at element "
        f"{index} of {count}; nothing was sent. Look for what made it, or set "
        f"comm.nan_check to False (COMMRT_NAN_CHECK=0)"
    )
