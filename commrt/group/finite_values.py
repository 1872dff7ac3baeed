# SPDX-License-Identifier: Apache-2.0
"""Looks for NaN and infinity in what a rank is about to send (COMMRT_NAN_CHECK).

An array on a device is copied to the host in its call's stream, piece by piece. So the
caller waits until the stream has come to the call. Nothing is looked at while a stream
is captured: the graph's values are not there yet.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from commrt import _native
from commrt.arrays.device import as_stream, current_stream_of
from commrt.arrays.host import HostView
from commrt.errors import NotFiniteError
from commrt.vocabulary.dtypes import DType

__all__ = [
    "Checked",
    "check_finite",
    "check_finite_on_stream",
    "may_be_not_finite",
    "not_finite",
    "read_back",
]

_Streams = tuple[Any, int | None]
_COPIED_NBYTES = 4 << 20
_OWN = threading.local()
_RELAXED = 2
"""The capture mode of calls that no other thread's capture is to end by."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...


class Checked(_Named, Protocol):
    """A group that may look at what its ranks send."""

    @property
    def nan_check(self) -> bool: ...


def check_finite(
    group: Checked, what: str, view: HostView | None, argument: str = "x"
) -> None:
    """Raise NotFiniteError where a checking group would send NaN or infinity.

    Arrays on devices are not looked at: their calls are, once their stream is known.
    """
    if not group.nan_check or view is None or view.on is not None:
        return
    found = _native.first_not_finite(view.dtype.code, view.address, view.count)
    _raise_found(group, what, argument, view, found)


def check_finite_on_stream(
    group: Checked,
    what: str,
    view: HostView | None,
    stream: Any = None,
    argument: str = "x",
    part: tuple[int, int] | None = None,
) -> None:
    """Do the same for an array of any place, as a stream has it.

    ``stream``: the call's, as the caller gave it; None: the device's current one.
    ``part``: begin and end of the elements that leave; None: all.
    """
    if not group.nan_check or view is None:
        return
    low, high = (0, view.count) if part is None else part
    if low == high or not may_be_not_finite(view.dtype):
        return
    at = view.address + low * view.dtype.itemsize
    if view.on is None:
        index, is_nan = _native.first_not_finite(view.dtype.code, at, high - low)
    else:
        index, is_nan = _first_on_device(what, view, at, high - low, stream)
    if index >= 0:
        _raise_found(group, what, argument, view, (low + index, is_nan))


def may_be_not_finite(dtype: DType) -> bool:
    """Return whether elements of a type can be NaN or infinity."""
    return dtype.kind in ("float", "complex")


def _first_on_device(
    what: str, view: HostView, address: int, count: int, stream: Any
) -> tuple[int, bool]:
    """Return index and kind of the first such element of a device's array, or -1."""
    itemsize = view.dtype.itemsize
    where = view.on, view.array, (stream, view.stream)
    for at, nbytes, start in _read(what, address, count * itemsize, *where):
        found = _native.first_not_finite(view.dtype.code, at, nbytes // itemsize)
        if found[0] >= 0:
            return start // itemsize + found[0], found[1]
    return -1, False


def read_back(
    what: str, address: int, nbytes: int, device: Any, array: Any, streams: _Streams
) -> npt.NDArray[np.uint8] | None:
    """Return bytes of a device's array, as its streams have it; None in a capture.

    ``streams``: the call's, as the caller gave it; None: the current one of ``array``.
    And the one that the array says it is ordered by, or None.
    """
    if _is_captured(what, device, array, streams):
        return None
    copy = np.empty(nbytes, np.uint8)
    for at, length, start in _read(what, address, nbytes, device, array, streams):
        ctypes.memmove(copy.ctypes.data + start, at, length)
    return copy


def _read(
    what: str, address: int, nbytes: int, device: Any, array: Any, streams: _Streams
) -> Iterator[tuple[int, int, int]]:
    """Yield copies on the host: address, bytes, and where they were; piecewise."""
    if _is_captured(what, device, array, streams):
        return
    handle, exported = _handle(what, device, array, streams[0]), streams[1]
    most = min(nbytes, _COPIED_NBYTES)
    at = _buffer(most).ctypes.data
    with _relaxed(device):
        if exported is not None and exported != handle:
            device.stream_synchronize(exported)
        for start in range(0, nbytes, most):
            length = min(most, nbytes - start)
            device.memcpy_async(at, address + start, length, handle)
            device.stream_synchronize(handle)
            yield at, length, start


def _buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of this thread's, which the next call gets, too.

    It is not pinned: to allocate that waits for the device, which may wait for this
    rank.
    """
    found: npt.NDArray[np.uint8] | None = getattr(_OWN, "buffer", None)
    if found is None or found.size < nbytes:
        found = _OWN.buffer = np.empty(nbytes, np.uint8)
    return found


def _is_captured(what: str, device: Any, array: Any, streams: _Streams) -> bool:
    handles = _handle(what, device, array, streams[0]), streams[1]
    return any(each is not None and device.is_capturing(each) for each in handles)


def _handle(what: str, device: Any, array: Any, stream: Any) -> int:
    """Return the stream of a call."""
    if stream is None:
        return current_stream_of(array, device)
    return as_stream(stream, device, what)


@contextmanager
def _relaxed(device: Any) -> Iterator[None]:
    before = device.exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        device.exchange_capture_mode(before)


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
