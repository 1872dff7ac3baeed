# SPDX-License-Identifier: Apache-2.0
"""What CUDA's documentation leaves open, asked of the GPU that is there.

``python tests/gpu/questions.py`` asks all, each in a process of its own with a time
limit, and prints one line of JSON for each answer; names as arguments choose some. The
simulation is held to the answers that docs/gpu.md lists.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import timed_questions
from asking import QUESTIONS, TIMED, ask, driver, flag_of, opened, question

__all__ = ["main", "timed_questions"]

HELD_S = 0.4
"""How long a stream is held while a call is watched."""


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


@question()
def which_calls_wait_for_another_threads_free() -> dict[str, Any]:
    """While a free waits for a held stream; the hang of a test says that some do."""
    gpu, found = opened(), {}
    memory, pinned = gpu.alloc(8192), gpu.pinned_alloc(8192)
    said, other, event = flag_of(gpu), gpu.stream_create(), gpu.event_create()
    calls: dict[str, Callable[[], Any]] = {
        "alloc": lambda: gpu.alloc(4096),
        "pinned_alloc": lambda: gpu.pinned_alloc(4096),
        "stream_create": gpu.stream_create,
        "event_create": gpu.event_create,
        "event_record": lambda: gpu.event_record(event, other),
        "event_query": lambda: gpu.event_query(event),
        "stream_wait_event": lambda: gpu.stream_wait_event(other, event),
        "write_value32": lambda: gpu.write_value32(other, said, 1),
        "copy": lambda: gpu.memcpy_async(memory, pinned, 64, other),
        "kernel": lambda: gpu.launch_copy(memory, memory + 4096, 64, other),
        "synchronize an idle stream": lambda: gpu.stream_synchronize(other),
        "ptr_attributes": lambda: gpu.ptr_attributes(memory),
    }
    frees: dict[str, Callable[[], Any]] = {
        "free": lambda: gpu.free(gpu.alloc(4096)),
        "pinned_free": lambda: gpu.pinned_free(gpu.pinned_alloc(4096)),
        "load_kernels": gpu.load_kernels,
    }
    for waiting, free in frees.items():
        for name, call in calls.items():
            flag, held = flag_of(gpu), gpu.stream_create()
            gpu.wait_value32_geq(held, flag, 1)
            thread = threading.Thread(target=free)
            thread.start()
            thread.join(0.1)  # it waits by now
            released = threading.Timer(HELD_S, gpu.flag_store, (flag, 1))
            released.start()
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            if took > HELD_S * 0.8:
                found.setdefault(waiting, []).append(name)
            released.join()
            thread.join()
            gpu.stream_synchronize(other)
    return found


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

        def giving(
            give: Any = give,
            stream: int = stream,
            given: Any = given,
            ended: Any = ended,
        ) -> None:
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


@question()
def event_query_beside_a_global_capture() -> dict[str, Any]:
    """Whether another thread's query ends a capture in global mode."""
    gpu = opened()
    stream, other = gpu.stream_create(), gpu.stream_create()
    event = gpu.event_create()
    gpu.event_record(event, other)
    gpu.stream_synchronize(other)
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


@question()
def kernels_are_compiled_and_loaded() -> dict[str, Any]:
    """How long the first opening of a device takes."""
    start = time.perf_counter()
    gpu = opened()
    took = time.perf_counter() - start
    return {"seconds": round(took, 2), "why_no_kernels": gpu.why_no_kernels}


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
