# SPDX-License-Identifier: Apache-2.0
"""Benchmarks' arrays on devices: one for each rank of a node, and its events as clock.

``thread`` is a device of threads, on which everything runs without a GPU; its times
are those of threads. Between the events of a repetition lie its calls, back to back in
one stream: the host's part is in them only where it is what takes longest. With
``host`` the clock is the host's, from before the first call until the stream is empty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from commrt import _native, env
from commrt.bench.timing_loop import Array, Call, HostMemory, Memory
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice
from commrt.devices.registry import cuda_device
from commrt.errors import DeviceMissingError, UsageError

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = [
    "DEVICES",
    "TIMINGS",
    "DeviceMemory",
    "Timing",
    "local_rank",
    "memory_for",
    "number_of_devices",
    "open_memory",
    "placed",
    "seen",
]

Timing = Literal["events", "host"]
TIMINGS: tuple[Timing, ...] = ("events", "host")
DEVICES = ("cpu", "cuda", "thread")
_FILL_NBYTES = 1 << 16
"""Copied from the host to fill an array; the rest is copied on the device."""


class _Part:
    """Some elements of an array on a device, in a row."""

    def __init__(self, whole: DeviceArray, low: int, size: int) -> None:
        self.whole = whole
        self.dtype = whole.dtype
        self.size = size
        self.address = whole.address + low * whole.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            **self.whole.__cuda_array_interface__,
            "shape": (self.size,),
            "data": (self.address, self.whole.readonly),
            "stream": None,  # used in the current one only
        }


class DeviceMemory:
    """Arrays on one device, and the stream in which a rank calls."""

    def __init__(self, device: _native.Device, timing: Timing) -> None:
        """Make the stream this thread's current one, for as long as the thread is."""
        self.device = device
        self.timing = timing
        self.stream = DeviceStream(device)
        self.stream.__enter__()
        self._before = device.timed_event_create()
        self._after = device.timed_event_create()
        self._pinned = 0
        self._pinned_nbytes = 0
        self._fills: dict[tuple[str, float], int] = {}

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceArray:
        """Return a new array; to allocate may wait for the device."""
        return DeviceArray(self.device, count, dtype)

    def split(self, array: DeviceArray, parts: int) -> list[Any]:
        """Return equal parts of an array, which share its memory."""
        size = array.size // parts
        return [_Part(array, part * size, size) for part in range(parts)]

    def fill(self, array: Any, value: float) -> None:
        """Set all elements, in the stream; the host does not wait."""
        nbytes = array.size * array.dtype.itemsize
        done = min(nbytes, _FILL_NBYTES)
        self._copy(array.address, self._filled(array.dtype, value), done)
        while done < nbytes:
            more = min(done, nbytes - done)
            self._copy(array.address + done, array.address, more)
            done += more

    def _filled(self, dtype: np.dtype[Any], value: float) -> int:
        """Return pinned memory with nothing but a value, kept from then on."""
        key = dtype.str + dtype.name, value
        if key not in self._fills:
            address = self.device.pinned_alloc(_FILL_NBYTES)
            values = np.full(_FILL_NBYTES // dtype.itemsize, value).astype(dtype)
            self.device.write(address, values.tobytes())
            self._fills[key] = address
        return self._fills[key]

    def write(self, array: Any, low: int, values: Array) -> None:
        """Set the elements from ``low`` on, and wait for it."""
        raw = values.astype(array.dtype).tobytes()
        pinned = self._buffer(len(raw))
        self.device.write(pinned, raw)
        self._copy(array.address + low * array.dtype.itemsize, pinned, len(raw))
        self.drain()

    def read(self, array: Any, low: int, high: int) -> Array:
        """Return elements [low, high), after all that is in the stream."""
        itemsize = array.dtype.itemsize
        nbytes = (high - low) * itemsize
        pinned = self._buffer(nbytes)
        self._copy(pinned, array.address + low * itemsize, nbytes)
        self.drain()
        return np.frombuffer(self.device.read(pinned, nbytes), array.dtype)

    def _buffer(self, nbytes: int) -> int:
        """Return pinned memory that nothing in the stream uses any more."""
        if nbytes > self._pinned_nbytes:
            if self._pinned:
                self.device.pinned_free(self._pinned)
            self._pinned = self.device.pinned_alloc(nbytes)
            self._pinned_nbytes = nbytes
        return self._pinned

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self.device.memcpy_async(target, source, nbytes, self.stream.handle)

    def timed(self, call: Call, calls: int) -> float:
        """Return the µs that so many calls take in the stream, one after the other."""
        device, stream = self.device, self.stream.handle
        if self.timing == "host":
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            device.stream_synchronize(stream)
            return (time.perf_counter_ns() - start) / 1000.0
        device.event_record(self._before, stream)
        for _ in range(calls):
            call()
        device.event_record(self._after, stream)
        device.stream_synchronize(stream)
        return device.event_elapsed(self._before, self._after)

    def drain(self) -> None:
        """Wait until the stream is empty."""
        self.device.stream_synchronize(self.stream.handle)

    def close(self) -> None:
        """Give stream, events and pinned memory back, in the thread that made it."""
        self.drain()
        pinned, self._pinned, self._pinned_nbytes = self._pinned, 0, 0
        for address in [*self._fills.values(), *([pinned] if pinned else [])]:
            self.device.pinned_free(address)
        self._fills.clear()
        for event in (self._before, self._after):
            self.device.event_destroy(event)
        self.stream.__exit__(None, None, None)
        self.stream.destroy()


def placed(memory: Memory, values: Array) -> Any:
    """Return an array of these values in ``memory``; on the host the very same."""
    if not isinstance(memory, DeviceMemory):
        return values
    return DeviceArray(memory.device, values.shape, values.dtype).put(values)


def seen(memory: Memory, array: Any) -> Array:
    """Return the values of an array that ``placed`` has made."""
    if not isinstance(memory, DeviceMemory):
        found: Array = array
        return found
    found = memory.read(array, 0, array.size).reshape(array.shape)
    return found


def memory_for(comm: Communicator, device: str, timing: Timing) -> Memory:
    """Return the memory for a rank's arrays, as ``-d`` and ``--timing`` say."""
    if device == "cpu":
        return HostMemory()
    return open_memory(device, timing, local_rank(comm.rank, comm.facts.layout))


def local_rank(rank: int, layout: Sequence[int]) -> int:
    """Return a rank's place among those of its node; ``layout`` has every rank's."""
    return list(layout[:rank]).count(layout[rank]) if layout else rank


def open_memory(kind: str, timing: Timing, place: int) -> DeviceMemory:
    """Return memory on the device of the ``place``-th rank of a node.

    Where there are more ranks than GPUs, they share. Raises DeviceMissingError where
    there is none, and UsageError where progress is off, as nothing would end.
    """
    number = number_of_devices(kind)
    if kind == "thread":
        return DeviceMemory(ThreadDevice(seed=place), timing)
    return DeviceMemory(cuda_device(place % number), timing)


def number_of_devices(kind: str) -> int:
    """Return the number of devices here, at least one.

    Raises the errors of ``open_memory``.
    """
    if env.read_str("COMMRT_PROGRESS") == "off":
        raise UsageError(
            f"-d {kind}: COMMRT_PROGRESS=off lets calls on devices go on in calls of "
            f"commrt only, and a benchmark waits for streams: leave it out"
        )
    if kind == "thread":
        return 1
    _, _, cards = _native.cuda_driver("")
    if not cards:
        raise DeviceMissingError(
            "-d cuda: the driver has no device: look at CUDA_VISIBLE_DEVICES and "
            "nvidia-smi, or try -d thread, a device of threads",
            "missing",
        )
    return len(cards)
