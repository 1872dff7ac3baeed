# SPDX-License-Identifier: Apache-2.0
"""What calls of the driver do beside a stream that waits; run by ``cuda_on_host``.

A test expects the answers that an H200 gave (``tests/gpu/questions.py``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "beside_captures",
    "calls_beside_frees",
    "calls_that_wait",
    "commands_behind_a_wait",
    "copies_that_wait",
    "many_pieces",
    "touch",
]

DEADLINE_S = 300.0
LOOKS = 2000


class Held:
    """A stream that waits for a flag, until ``release()``."""

    def __init__(self, gpu: Any) -> None:
        self.gpu, self.stream = gpu, gpu.stream_create()
        self.flag = gpu.pinned_alloc(64)
        gpu.write(self.flag, bytes(64))
        gpu.wait_value32_geq(self.stream, self.flag, 1)

    def release(self) -> None:
        self.gpu.flag_store(self.flag, 1)

    def waits(self, call: Callable[[], Any], expected: bool) -> bool:
        """Whether a call waits for the stream; the stream is free then.

        One that is not expected to wait has a long time to come back.
        """
        thread = threading.Thread(target=call)
        thread.start()
        if not expected:
            thread.join(DEADLINE_S)
        for _ in range(LOOKS):
            self.gpu.pause()
        found = thread.is_alive()
        self.release()
        thread.join(DEADLINE_S)
        self.gpu.stream_synchronize(self.stream)
        self.gpu.stream_destroy(self.stream)  # others may have its hardware queue
        return found


def calls_that_wait(expected: list[str]) -> list[str]:
    """Return the names of calls that wait for a stream that they are not about."""
    from commrt.devices.registry import cuda_device

    gpu = cuda_device(0)
    memory, pinned = gpu.alloc(8192), gpu.pinned_alloc(8192)
    ordinary = np.zeros(64, np.uint8).ctypes.data
    other, event = gpu.stream_create(), gpu.event_create()
    idle = gpu.stream_create()
    calls: dict[str, Callable[[], Any]] = {
        "alloc": lambda: gpu.alloc(64),
        "pinned_alloc": lambda: gpu.pinned_alloc(64),
        "free": lambda: gpu.free(gpu.alloc(64)),
        "pinned_free": lambda: gpu.pinned_free(gpu.pinned_alloc(64)),
        "load_kernels": gpu.load_kernels,
        "stream_create": gpu.stream_create,
        "stream_destroy": lambda: gpu.stream_destroy(idle),
        "event_create": gpu.event_create,
        "event_destroy": lambda: gpu.event_destroy(event),
        "pageable copy": lambda: gpu.memcpy_async(memory, ordinary, 64, other),
        "copy": lambda: gpu.memcpy_async(memory, pinned, 64, other),
        "kernel": lambda: gpu.launch_copy(memory, memory + 4096, 64, other),
        "copy and synchronize": lambda: (
            gpu.memcpy_async(memory, pinned, 64, other),
            gpu.stream_synchronize(other),
        ),
    }
    assert set(expected) <= set(calls)
    return [
        name for name, call in calls.items() if Held(gpu).waits(call, name in expected)
    ]


def commands_behind_a_wait(number: int) -> list[bool]:
    """Whether so many commands go behind a wait, and whether one more does."""
    from commrt.devices.registry import cuda_device

    gpu = cuda_device(0)
    memory = gpu.alloc(8192)
    held = Held(gpu)

    def give(times: int) -> None:
        for _ in range(times):
            gpu.memcpy_async(memory, memory + 4096, 64, held.stream)

    first = threading.Thread(target=give, args=(number,))
    first.start()
    first.join(DEADLINE_S)
    return [not first.is_alive(), not held.waits(lambda: give(1), expected=True)]


def beside_captures() -> dict[str, list[str]]:
    """Let another thread ask for an event and memory beside captures of each mode."""
    import questions

    found: dict[str, list[str]] = questions.event_query_beside_a_global_capture()
    return found


def copies_that_wait(expected: list[str]) -> list[str]:
    """Return which copies wait for their own stream, which is held."""
    from commrt.devices.registry import cuda_device

    gpu = cuda_device(0)
    pinned, memory = gpu.pinned_alloc(8192), gpu.alloc(8192)
    ordinary = np.zeros(64, np.uint8)
    ways = {
        "pinned to pinned": (pinned, pinned + 4096),
        "pinned to device": (memory, pinned),
        "device to pinned": (pinned, memory),
        "device to device": (memory, memory + 4096),
        "pageable to device": (memory, ordinary.ctypes.data),
        "device to pageable": (ordinary.ctypes.data, memory),
    }
    found = []
    for name, (to, source) in ways.items():
        held = Held(gpu)

        def copy(to: int = to, source: int = source, held: Held = held) -> None:
            gpu.memcpy_async(to, source, 64, held.stream)

        if held.waits(copy, name in expected):
            found.append(name)
    return found


def touch() -> None:
    """Read memory of the device by a host thread."""
    from commrt.devices.registry import cuda_device

    ctypes.string_at(cuda_device(0).alloc(64), 1)


def many_pieces(pieces: int, nbytes: int) -> bool:
    """Whether a staged call of so many pieces sums right."""
    import commrt
    from commrt.devices import DeviceArray, DeviceStream
    from commrt.devices.registry import cuda_device

    comm = commrt.init()
    gpu = cuda_device(0)
    with DeviceStream(gpu) as stream:
        x = DeviceArray(gpu, pieces * nbytes, "uint8")
        x.put(np.full(pieces * nbytes, 1 + comm.rank, "u1"))
        comm.allreduce(x, algorithm=f"staged/direct{{piece={nbytes}}}")
        stream.synchronize()
        right = bool((x.get() == sum(range(1, comm.size + 1))).all())
    comm.barrier()
    return right


def calls_beside_frees(kind: str, number: int, algorithm: str | None = None) -> bool:
    """Make calls while another thread frees memory that has nothing to do with them."""
    import commrt
    from commrt.backends.mpi import attached as mpi_calls
    from commrt.devices import DeviceArray, DeviceStream
    from commrt.devices.registry import cuda_device

    comm = commrt.init()
    gpu = cuda_device(0)
    if kind == "mpi":  # the library is told that it takes memory of the device
        mpi_calls.KINDS.add("the host's")
    stopped = threading.Event()
    greater = commrt.reduction(np.maximum)

    def free() -> None:
        while not stopped.is_set():
            gpu.free(gpu.alloc(64))

    with DeviceStream(gpu) as stream:
        x, out = DeviceArray(gpu, 1000, "float32"), DeviceArray(gpu, 1000, "float32")
        x.put(np.ones(1000, "f4"))
        picked = DeviceArray(gpu, 1000, "int32").put(np.arange(1000, dtype="i4"))
        other = 1 - comm.rank
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: comm.allreduce(
                x, op="max", out=out, algorithm=algorithm
            ),
            "messages": lambda: comm.sendrecv(x, dest=other, source=other, out=out),
            "a function": lambda: comm.allreduce(x, op=greater, out=out),
            "compressed": lambda: comm.alltoall(x, out=out, compress="float16"),
            "sparse": lambda: comm.sparse_allreduce(
                (picked, x, (1000,)), result="sparse"
            ),
            "mpi": lambda: comm.allreduce(
                x, op="prod", out=out, algorithm="mpi/native"
            ),
        }
        call = calls[kind]
        call()  # the ranks meet
        thread = threading.Thread(target=free)
        thread.start()
        for _ in range(number):
            made = call()
        stream.synchronize()
        stopped.set()
        thread.join()
        if kind == "sparse":
            right = bool((made.values.get() == comm.size).all())
        else:
            right = bool((out.get() == 1).all())
    comm.barrier()
    return right
