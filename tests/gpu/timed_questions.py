# SPDX-License-Identifier: Apache-2.0
"""What commands cost on a GPU, and how soon flags and events come."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from asking import driver, flag_of, opened, question, spread

__all__ = ["batches_of_flags_us", "latencies_us"]


@question(timed=True)
def latencies_us() -> dict[str, Any]:
    """Of flags both ways, of events, of launches, as Python sees them."""
    gpu = opened()
    first, second = gpu.stream_create(), gpu.stream_create()
    go, said, memory = flag_of(gpu), flag_of(gpu), gpu.alloc(1 << 16)
    event = gpu.event_create()
    clock = time.perf_counter_ns
    found: dict[str, Any] = {}

    def measured(name: str, once: Callable[[int], float]) -> None:
        samples = [once(i) for i in range(1, 2001)]
        found[name] = spread(samples[200:])

    def until(flag: int, value: int) -> None:
        while gpu.flag_load(flag) != value:
            pass

    def write_seen(i: int) -> float:
        start = clock()
        gpu.write_value32(first, said, i)
        until(said, i)
        return (clock() - start) / 1000

    def round_trip(i: int) -> float:
        gpu.wait_value32_geq(first, go, i)
        gpu.write_value32(first, said, 10_000 + i)
        wait_us = clock() + 20_000
        while clock() < wait_us:
            pass
        start = clock()
        gpu.flag_store(go, i)
        until(said, 10_000 + i)
        return (clock() - start) / 1000

    def cross(i: int) -> float:
        gpu.wait_value32_geq(first, go, 100_000 + i)
        gpu.event_record(event, first)
        gpu.stream_wait_event(second, event)
        gpu.write_value32(second, said, 100_000 + i)
        wait_us = clock() + 20_000
        while clock() < wait_us:
            pass
        start = clock()
        gpu.flag_store(go, 100_000 + i)
        until(said, 100_000 + i)
        return (clock() - start) / 1000

    def submitted(give: Callable[[], Any]) -> Callable[[int], float]:
        def once(i: int) -> float:
            start = clock()
            give()
            took = (clock() - start) / 1000
            if i % 64 == 0:
                gpu.stream_synchronize(first)
            return took

        return once

    def copied(give: Callable[[], Any]) -> Callable[[int], float]:
        def once(i: int) -> float:
            start = clock()
            give()
            gpu.write_value32(first, said, 200_000 + i)
            until(said, 200_000 + i)
            return (clock() - start) / 1000

        return once

    pinned = flag_of(gpu)
    measured("write of a flag, seen by the host", write_seen)
    measured("host's flag, stream, flag back", round_trip)
    measured("the same over an event to another stream", cross)
    measured(
        "submit: write_value32", submitted(lambda: gpu.write_value32(first, said, 0))
    )
    measured("submit: event_record", submitted(lambda: gpu.event_record(event, first)))
    measured(
        "submit: stream_wait_event",
        submitted(lambda: gpu.stream_wait_event(second, event)),
    )
    measured(
        "submit: copy of 8 B",
        submitted(lambda: gpu.memcpy_async(memory, pinned, 8, first)),
    )
    measured(
        "submit: kernel",
        submitted(lambda: gpu.launch_copy(memory, memory + 64, 8, first)),
    )
    measured(
        "copy of 8 B to the device, and flag",
        copied(lambda: gpu.memcpy_async(memory, pinned, 8, first)),
    )
    measured(
        "copy of 8 B to the host, and flag",
        copied(lambda: gpu.memcpy_async(pinned, memory, 8, first)),
    )
    measured(
        "kernel of 8 B to the host, and flag",
        copied(lambda: gpu.launch_copy(pinned, memory, 8, first)),
    )
    measured(
        "kernel of 8 B to the device, and flag",
        copied(lambda: gpu.launch_copy(memory, pinned, 8, first)),
    )
    return found


@question(timed=True)
def batches_of_flags_us() -> dict[str, Any]:
    """What a write and a wait cost together, as one call and as two, by ctypes."""
    gpu, cuda = opened(), driver()
    flag = flag_of(gpu)
    stream = gpu.stream_create()
    handle, address = ctypes.c_void_p(stream), ctypes.c_uint64(flag)
    value = ctypes.c_uint32(1)

    class Operation(ctypes.Structure):
        _fields_ = (
            ("kind", ctypes.c_int),
            ("address", ctypes.c_uint64),
            ("value", ctypes.c_uint64),
            ("flags", ctypes.c_uint),
            ("alias", ctypes.c_uint64),
        )

    class Union(ctypes.Union):
        _fields_ = (("operation", Operation), ("pad", ctypes.c_uint64 * 6))

    batch = (Union * 2)()
    batch[0].operation.kind, batch[0].operation.address = 2, flag  # write
    batch[0].operation.value = 1
    batch[1].operation.kind, batch[1].operation.address = 1, flag  # wait
    batch[1].operation.value = 1

    def one() -> int:
        code: int = cuda.cuStreamBatchMemOp_v2(handle, 2, batch, 0)
        return code

    def two() -> int:
        first: int = cuda.cuStreamWriteValue32_v2(handle, address, value, 0)
        second: int = cuda.cuStreamWaitValue32_v2(handle, address, value, 0)
        return first + second

    def nothing() -> int:
        code: int = cuda.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))
        return code

    long = ctypes.c_size_t(4 << 20)
    host, device = gpu.pinned_alloc(long.value), gpu.alloc(long.value)
    to, source = ctypes.c_uint64(device), ctypes.c_uint64(host)
    nbytes = ctypes.c_size_t(8)
    calls = {
        "a call that does nothing": nothing,
        "write and wait in one": one,
        "write and wait in two": two,
        "cuMemcpyAsync in": lambda: cuda.cuMemcpyAsync(to, source, nbytes, handle),
        "cuMemcpyHtoDAsync": lambda: cuda.cuMemcpyHtoDAsync_v2(
            to, ctypes.c_void_p(host), nbytes, handle
        ),
        "cuMemcpyAsync out": lambda: cuda.cuMemcpyAsync(source, to, nbytes, handle),
        "cuMemcpyDtoHAsync": lambda: cuda.cuMemcpyDtoHAsync_v2(
            ctypes.c_void_p(host), to, nbytes, handle
        ),
        "cuMemcpyAsync in, 4 MiB": lambda: cuda.cuMemcpyAsync(to, source, long, handle),
        "cuMemcpyAsync out, 4 MiB": lambda: cuda.cuMemcpyAsync(
            source, to, long, handle
        ),
        "cuMemcpyDtoHAsync, 4 MiB": lambda: cuda.cuMemcpyDtoHAsync_v2(
            ctypes.c_void_p(host), to, long, handle
        ),
        "write with a barrier": lambda: cuda.cuStreamWriteValue32_v2(
            handle, address, value, 0
        ),
        "wait": lambda: cuda.cuStreamWaitValue32_v2(handle, address, value, 0),
    }
    found = {}
    for name, call in calls.items():
        samples = []
        for turn in range(3000):
            start = time.perf_counter_ns()
            code = call()
            samples.append((time.perf_counter_ns() - start) / 1000)
            assert code == 0, (name, code)
            if turn % 64 == 0:
                gpu.stream_synchronize(stream)
        found[name] = spread(samples[500:])
    return found
