# SPDX-License-Identifier: Apache-2.0
"""What CUDA's documentation leaves open, asked of the GPU that is there.

``python tests/gpu/questions.py`` asks all, each in a process of its own with a time
limit, and prints one line of JSON for each answer; names as arguments choose some. The
simulation is held to the answers that docs/gpu.md lists.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LIMIT_S = 40.0
HELD_S = 0.4
"""How long a stream is held while a call is watched."""
QUESTIONS: dict[str, Callable[[], Any]] = {}
TIMED: set[str] = set()
ENVIRONMENT: dict[str, dict[str, str]] = {}


def question(
    *, timed: bool = False, **environment: str
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a question; timed ones run alone."""

    def registered(function: Callable[[], Any]) -> Callable[[], Any]:
        name = function.__name__
        QUESTIONS[name] = function
        ENVIRONMENT[name] = environment
        if timed:
            TIMED.add(name)
        return function

    return registered


def opened() -> Any:
    """Return the first GPU, with its kernels."""
    from commrt.devices.registry import cuda_device

    return cuda_device(0)


def driver() -> Any:
    """Return libcuda with a context of the first GPU current."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuInit(0)
    context = ctypes.c_void_p()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    return cuda


def flag_of(gpu: Any) -> int:
    """Return pinned memory that is 0."""
    address: int = gpu.pinned_alloc(4096)
    gpu.write(address, bytes(64))
    return address


def spread(samples_us: list[float]) -> dict[str, float]:
    """Return the quantiles of samples."""
    ordered = sorted(samples_us)
    return {
        "p1": round(ordered[len(ordered) // 100], 2),
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[len(ordered) * 99 // 100], 2),
    }


@question()
def attributes() -> dict[str, int]:
    """What the card says of itself."""
    cuda, found = driver(), {}
    numbers = {
        "unified_addressing": 41,
        "async_engines": 40,
        "host_native_atomics": 86,
        "stream_memops_v1": 92,
        "stream_memops_64_v1": 93,
        "wait_value_nor_v1": 94,
        "flush_remote_writes": 98,
        "host_pointer_for_registered": 91,
        "pageable_memory_access": 88,
        "stream_memops_64": 122,
        "wait_value_nor": 123,
        "ipc_events": 125,
        "numa_id": 134,
        "multicast": 132,
        "compute_mode": 20,
    }
    for name, number in numbers.items():
        value = ctypes.c_int(-1)
        result = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        found[name] = value.value if result == 0 else -result
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    found["driver_version"] = version.value
    return found


@question()
def pinned_memory_has_one_address() -> dict[str, Any]:
    """Whether ``cuMemHostAlloc`` memory has its own address on the device."""
    cuda, same = driver(), []
    for nbytes in (4, 4096, 1 << 20, 64 << 20):
        host, there = ctypes.c_void_p(), ctypes.c_uint64()
        code = cuda.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(nbytes), 3)
        assert code == 0, code
        code = cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(there), host, 0)
        same.append(code == 0 and there.value == host.value)
    return {"same": all(same)}


@question()
def ipc_handle_in_its_own_process() -> dict[str, int]:
    """What opening a handle says to the process that made it."""
    cuda = driver()
    memory, mapped = ctypes.c_uint64(), ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 21)) == 0

    class Handle(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_char * 64),)

    handle = Handle()
    got = cuda.cuIpcGetMemHandle(ctypes.byref(handle), memory)
    code = cuda.cuIpcOpenMemHandle_v2(ctypes.byref(mapped), handle, 1)
    return {"get": got, "open": code}


@question()
def driver_call_in_a_host_function() -> dict[str, int]:
    """Which error a host function gets that calls the driver."""
    cuda, found = driver(), {}
    stream = ctypes.c_void_p()
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def called(_: Any) -> None:
        memory, event = ctypes.c_uint64(), ctypes.c_void_p()
        found["cuMemAlloc"] = cuda.cuMemAlloc_v2(
            ctypes.byref(memory), ctypes.c_size_t(8)
        )
        found["cuEventCreate"] = cuda.cuEventCreate(ctypes.byref(event), 2)
        found["cuStreamQuery"] = cuda.cuStreamQuery(stream)

    assert cuda.cuLaunchHostFunc(stream, called, None) == 0
    cuda.cuStreamSynchronize(stream)
    return found


def held_calls() -> dict[str, Any]:
    """For how long each call blocks while a stream waits for a flag.

    A thread releases the stream after HELD_S: a call that takes so long has waited.
    """
    gpu = opened()
    cuda = driver()
    found: dict[str, Any] = {}
    memory, pinned = gpu.alloc(1 << 20), gpu.pinned_alloc(1 << 20)
    pageable = ctypes.create_string_buffer(1 << 20)
    spare, spare_pinned = gpu.alloc(1 << 20), gpu.pinned_alloc(1 << 20)
    other = gpu.stream_create()
    gpu.memcpy_async(memory, pinned, 1 << 20, other)
    gpu.stream_synchronize(other)
    idle_event = gpu.event_create()

    def raw_copy(kind: str) -> None:
        source = ctypes.c_uint64(ctypes.addressof(pageable))
        to = ctypes.c_uint64(memory)
        args = (to, source) if kind == "in" else (source, to)
        code = cuda.cuMemcpyAsync(*args, ctypes.c_size_t(65536), ctypes.c_void_p(other))
        assert code == 0, code

    calls: dict[str, Callable[[], Any]] = {
        "alloc 1 MiB": lambda: gpu.alloc(1 << 20),
        "alloc 256 MiB": lambda: gpu.alloc(256 << 20),
        "free": lambda: gpu.free(spare),
        "pinned_alloc": lambda: gpu.pinned_alloc(1 << 20),
        "pinned_free": lambda: gpu.pinned_free(spare_pinned),
        "stream_create": gpu.stream_create,
        "stream_destroy of an idle one": lambda: gpu.stream_destroy(other_streams[0]),
        "event_create": gpu.event_create,
        "event_destroy": lambda: gpu.event_destroy(idle_event),
        "copy from pinned to pinned in another stream": lambda: gpu.memcpy_async(
            pinned + 4096, pinned, 4096, other
        ),
        "copy from pageable in another stream": lambda: raw_copy("in"),
        "copy to pageable in another stream": lambda: raw_copy("out"),
        "kernel in another stream": lambda: gpu.launch_copy(
            memory, memory + 4096, 4096, other
        ),
        "synchronize another stream": lambda: gpu.stream_synchronize(other),
        "copy in the legacy stream": lambda: gpu.memcpy_async(memory, pinned, 64, 0),
        "synchronize the legacy stream": lambda: gpu.stream_synchronize(0),
        "load_kernels": gpu.load_kernels,
        "stream_destroy of the held one": lambda: gpu.stream_destroy(held[-1]),
    }
    other_streams = [gpu.stream_create()]
    held: list[int] = []
    for name, call in calls.items():
        flag = flag_of(gpu)
        stream = gpu.stream_create()
        held.append(stream)
        gpu.wait_value32_geq(stream, flag, 1)
        gpu.memcpy_async(memory, pinned, 64, stream)
        released = threading.Timer(HELD_S, gpu.flag_store, (flag, 1))
        released.start()
        start = time.perf_counter()
        try:
            call()
            took = time.perf_counter() - start
            found[name] = "waits" if took > HELD_S * 0.8 else f"{took * 1e6:.0f} us"
        except Exception as error:  # noqa: BLE001  the answer
            found[name] = f"{type(error).__name__}: {error}"
        released.join()
        if "held" not in name:
            gpu.stream_synchronize(stream)
    return found


@question()
def which_calls_wait_for_a_held_stream() -> dict[str, Any]:
    """With as many hardware queues as usual."""
    return held_calls()


@question(CUDA_DEVICE_MAX_CONNECTIONS="1")
def which_calls_wait_with_one_queue() -> dict[str, Any]:
    """With one hardware queue for all streams."""
    return held_calls()


def streams_behind_a_wait(number: int) -> int:
    """Return how many of so many other streams a waiting one holds up."""
    gpu = opened()
    flag = flag_of(gpu)
    held = gpu.stream_create()
    streams = [gpu.stream_create() for _ in range(number)]
    said = [flag_of(gpu) for _ in streams]
    gpu.wait_value32_geq(held, flag, 1)
    for stream, each in zip(streams, said, strict=True):
        gpu.write_value32(stream, each, 1)
    end = time.perf_counter() + HELD_S
    while time.perf_counter() < end:
        pass
    stuck = sum(gpu.flag_load(each) == 0 for each in said)
    gpu.flag_store(flag, 1)
    for stream in streams:
        gpu.stream_synchronize(stream)
    return stuck


@question()
def streams_that_a_wait_holds_up() -> dict[str, int]:
    """Of 64 streams, with 8 hardware queues, which is the default."""
    return {"of 64": streams_behind_a_wait(64)}


@question(CUDA_DEVICE_MAX_CONNECTIONS="1")
def streams_that_a_wait_holds_up_with_one_queue() -> dict[str, int]:
    """Of 8 streams with one hardware queue."""
    return {"of 8": streams_behind_a_wait(8)}


@question(CUDA_DEVICE_MAX_CONNECTIONS="32")
def streams_that_a_wait_holds_up_with_32_queues() -> dict[str, int]:
    """Of 64 streams with 32 hardware queues."""
    return {"of 64": streams_behind_a_wait(64)}


@question()
def commands_that_a_stream_takes() -> dict[str, Any]:
    """How many commands go behind a wait before the caller is blocked."""
    gpu = opened()
    flag, memory = flag_of(gpu), gpu.alloc(4096)
    found = {}
    for name, give in {
        "copies": lambda stream: gpu.memcpy_async(memory, memory + 64, 64, stream),
        "kernels": lambda stream: gpu.launch_copy(memory, memory + 64, 64, stream),
        "flags": lambda stream: gpu.write_value32(stream, flag + 64, 1),
    }.items():
        stream = gpu.stream_create()
        value = gpu.flag_load(flag) + 1
        gpu.wait_value32_geq(stream, flag, value)
        given = [0]
        ended = threading.Event()

        def giving(give: Any = give, stream: int = stream, given: Any = given) -> None:
            while given[0] < 20_000 and not ended.is_set():
                give(stream)
                given[0] += 1

        thread = threading.Thread(target=giving)
        thread.start()
        thread.join(2.0)
        found[name] = given[0] if thread.is_alive() else f"more than {given[0] - 1}"
        ended.set()
        gpu.flag_store(flag, value)
        thread.join()
        gpu.stream_synchronize(stream)
    return found


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


@question()
def event_query_beside_a_global_capture() -> dict[str, Any]:
    """Whether another thread's query ends a capture in global mode."""
    gpu = opened()
    stream, other = gpu.stream_create(), gpu.stream_create()
    event = gpu.event_create()
    gpu.event_record(event, other)
    found: dict[str, Any] = {}
    for mode, name in ((0, "global"), (1, "thread"), (2, "relaxed")):
        gpu.begin_capture(stream, mode)
        said = []

        def ask(said: list[str] = said) -> None:
            try:
                said.append(f"query: {gpu.event_query(event)}")
                gpu.free(gpu.alloc(8))
                said.append("alloc: allowed")
            except Exception as error:  # noqa: BLE001  the answer
                said.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        try:
            gpu.graph_destroy(gpu.end_capture(stream))
            said.append("the capture is good")
        except Exception as error:  # noqa: BLE001  the answer
            said.append(f"the capture: {error}")
        found[name] = said
    return found


@question()
def copies_between_host_memory_block() -> dict[str, Any]:
    """Whether a copy from pinned to pinned memory waits for its held stream."""
    gpu, found = opened(), {}
    pinned, memory = gpu.pinned_alloc(8192), gpu.alloc(8192)
    ways = {
        "pinned to pinned": (pinned, pinned + 4096),
        "pinned to device": (memory, pinned),
        "device to pinned": (pinned, memory),
        "device to device": (memory, memory + 4096),
    }
    for name, (to, source) in ways.items():
        flag, stream = flag_of(gpu), gpu.stream_create()
        gpu.wait_value32_geq(stream, flag, 1)
        released = threading.Timer(HELD_S, gpu.flag_store, (flag, 1))
        released.start()
        start = time.perf_counter()
        gpu.memcpy_async(to, source, 4096, stream)
        took = time.perf_counter() - start
        found[name] = "waits" if took > HELD_S * 0.8 else f"{took * 1e6:.0f} us"
        released.join()
        gpu.stream_synchronize(stream)
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
        "write without a barrier": lambda: cuda.cuStreamWriteValue32_v2(
            handle, address, value, 1
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


@question()
def kernels_are_compiled_and_loaded() -> dict[str, Any]:
    """How long the first opening of a device takes."""
    start = time.perf_counter()
    gpu = opened()
    took = time.perf_counter() - start
    return {"seconds": round(took, 2), "why_no_kernels": gpu.why_no_kernels}


def ask(name: str) -> str:
    """Ask in a process of its own; return a line of JSON."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--here", name],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=os.sep,
            env={**os.environ, **ENVIRONMENT[name]},
            check=False,
        )
        said: Any = done.stdout.splitlines()[-1] if done.returncode == 0 else ""
        answer = json.loads(said) if said else f"failed: {done.stderr[-600:]}"
    except subprocess.TimeoutExpired:
        answer = f"no answer in {LIMIT_S} s"
    took = round(time.monotonic() - start, 1)
    return json.dumps({"question": name, "answer": answer, "seconds": took})


def main(words: list[str]) -> None:
    """Ask the questions that are named, or all."""
    if words[:1] == ["--here"]:
        print(json.dumps(QUESTIONS[words[1]]()))
        return
    names = words or list(QUESTIONS)
    with ThreadPoolExecutor(4) as pool:
        for line in pool.map(ask, [name for name in names if name not in TIMED]):
            print(line, flush=True)
    for name in names:
        if name in TIMED:
            print(ask(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
