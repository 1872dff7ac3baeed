# SPDX-License-Identifier: Apache-2.0
"""Arrays and streams of any device, for programs and tests without a GPU library.

A ``DeviceArray`` is what an array of cupy is to commrt: memory of a device that says of
itself, by ``__cuda_array_interface__``, where it lies. It computes nothing.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from types import TracebackType
from typing import Any

import numpy as np

from commrt import _native
from commrt._native import Device
from commrt.errors import CommError, UsageError

__all__ = [
    "DeviceArray",
    "DeviceStream",
    "current_devices",
    "current_stream",
    "free_what_was_left",
    "freeing_nothing",
    "give_back",
    "may_free",
]

_CURRENT = threading.local()
_LEFT = "_left_memory"
"""Attribute of a device: memory that threads were not allowed to free. It is freed
before more is allocated on that device, so the device never holds more than the program
asked for. It goes with the device, as no table of commrt's keeps it."""


@contextmanager
def freeing_nothing() -> Iterator[None]:
    """Leave memory of devices to other threads, the garbage collector's finds, too.

    To free it may wait for all that the device was given, and that for this thread.
    """
    before = _native.leaves_arrays()
    _native.leave_arrays(True)
    try:
        yield
    finally:
        _native.leave_arrays(before)


def free_what_was_left(device: Device) -> None:
    """Free what other threads left of a device's memory, which waits for the device.

    It frees memory of this device alone: another one may wait for this thread's next
    call.
    """
    left: deque[tuple[int, int]] | None = device.__dict__.get(_LEFT)
    while left and may_free():
        try:
            each = left.popleft()
        except IndexError:  # another thread looks, too
            return
        # Nobody is there to be told of a device that failed or is gone.
        with suppress(CommError):
            _free(device, *each)


def give_back(device: Device, address: int, pinned: int = 0) -> None:
    """Free memory, where this thread may; else leave it to others."""
    if not (address or pinned):  # it has been given back before
        return
    if not may_free():
        device.__dict__.setdefault(_LEFT, deque()).append((address, pinned))
        return
    free_what_was_left(device)
    _free(device, address, pinned)


def may_free() -> bool:
    """Return whether this thread may wait for devices, as to free memory does."""
    return not _native.leaves_arrays()


def _free(device: Device, address: int, pinned: int) -> None:
    if address:
        device.free(address)
    if pinned:
        device.pinned_free(pinned)


class DeviceStream:
    """A stream of a device; ``with stream:`` makes it this thread's current one."""

    def __init__(self, device: Device, *, priority: int = 0) -> None:
        """Make a stream that does not take turns with the legacy stream 0."""
        self.device = device
        self.handle = device.stream_create(priority)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        """Wait until the stream has done all it was given."""
        self.device.stream_synchronize(self.handle)

    def destroy(self) -> None:
        """Give it back."""
        self.device.stream_destroy(self.handle)

    def __enter__(self) -> DeviceStream:
        _streams().append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _streams().pop()

    def __repr__(self) -> str:
        return f"<DeviceStream {self.handle} of a {self.device.kind} device>"


def _streams() -> list[DeviceStream]:
    if not hasattr(_CURRENT, "streams"):
        _CURRENT.streams = []
    found: list[DeviceStream] = _CURRENT.streams
    return found


def current_stream(device: Device) -> int:
    """Return this thread's current stream of a device; 0, the legacy one, by itself."""
    for stream in reversed(_streams()):
        if stream.device is device:
            return stream.handle
    return 0


def current_devices() -> list[Device]:
    """Return the devices of this thread's current streams, the latest first."""
    return [stream.device for stream in reversed(_streams())]


class DeviceArray:
    """An array in the memory of a device, C-contiguous.

    Its memory goes with it; ``free()`` gives it back at once. Both may wait for all
    that the device was given, as may making one. Its content before the first ``put``
    is undefined.
    """

    def __init__(
        self,
        device: Device,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        *,
        readonly: bool = False,
    ) -> None:
        self.device = device
        self.dtype = np.dtype(dtype)
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.readonly = readonly
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        self._pinned = 0
        free_what_was_left(device)  # to allocate may wait for the device just as well
        self._address = device.alloc(max(1, self.nbytes))

    @property
    def address(self) -> int:
        """Address of the first element."""
        if self._address == 0:
            raise UsageError("the memory of this DeviceArray was freed: make a new one")
        return self._address

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = current_stream(self.device)
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, self.readonly),
            "strides": None,
            "version": 3,
            "stream": stream or 1,  # 0 would be ambiguous: 1 is the legacy stream
        }

    def new_empty(self, shape: int | Sequence[int]) -> DeviceArray:
        """Return a new array on the same device, of the same type."""
        return DeviceArray(self.device, shape, self.dtype)

    def put(self, values: Any, *, stream: int | None = None) -> DeviceArray:
        """Copy values from the host, in a stream; returns itself."""
        array = np.ascontiguousarray(values, self.dtype)
        if array.size != prod(self.shape):
            raise UsageError(
                f"put: {array.size} values for an array of shape {self.shape}; "
                f"expected {prod(self.shape)}"
            )
        device, handle = self.device, self._stream(stream)
        device.write(self._buffer(), array.tobytes())
        device.memcpy_async(self.address, self._buffer(), self.nbytes, handle)
        device.stream_synchronize(handle)
        return self

    def get(self, *, stream: int | None = None) -> np.ndarray[Any, Any]:
        """Return a copy in host memory, made in a stream after all that is in it."""
        device, handle = self.device, self._stream(stream)
        device.memcpy_async(self._buffer(), self.address, self.nbytes, handle)
        device.stream_synchronize(handle)
        raw = device.read(self._buffer(), self.nbytes)
        flat: np.ndarray[Any, Any] = np.frombuffer(raw, self.dtype).copy()
        return flat.reshape(self.shape)

    def _buffer(self) -> int:
        """Return pinned memory, kept: to free it would wait for the whole device."""
        if self._pinned == 0:
            self._pinned = self.device.pinned_alloc(max(1, self.nbytes))
        return self._pinned

    def _stream(self, stream: int | None) -> int:
        return current_stream(self.device) if stream is None else stream

    def free(self) -> None:
        """Give the memory back, which waits for the device; idempotent.

        With COMMRT_PROGRESS=off a UsageError while calls are under way: some may have
        the array, and nobody but their caller ends them.
        """
        for why_not in getattr(self.device, "why_no_free", ()):
            if self._address and (text := why_not()):
                raise UsageError(text)
        self._give_back()

    def _give_back(self) -> None:
        address, self._address = self._address, 0
        pinned, self._pinned = self._pinned, 0
        give_back(self.device, address, pinned)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # A device that failed or is gone has taken its memory along.
        with suppress(CommError, AttributeError):
            self._give_back()  # what nobody refers to no call has

    def __repr__(self) -> str:
        return f"<DeviceArray {self.shape} {self.dtype} on a {self.device.kind} device>"
