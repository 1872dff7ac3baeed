# SPDX-License-Identifier: Apache-2.0
"""A staged allreduce beside what it is made of: ``bench parts``.

Long: the copies in either direction, alone and both at once, and the call, which moves
as many bytes both ways. Its bound is the slower direction. Short: each step that a call
of 8 bytes has to take, one after the other, and the call. Medians, by the host's clock
up to the end of the work but for the long copies, which events time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.device_memory import DeviceMemory, local_rank, open_memory
from commrt.bench.own_ranks import report, tell
from commrt.bench.timing_loop import Call

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["Parts", "main", "measure", "text"]

_SHORT_NBYTES = 8
_MORE_SHORT = 10
"""Factor of repetitions: short steps are repeated so many times as often as long
ones."""


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where a result was wrong."""
    args.ranks = args.ranks or [1]
    job = {
        "device": args.device,
        "nbytes": args.message_size,
        "iterations": args.iterations,
    }
    return report(args, job, "commrt.bench.device_parts", measure, text)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; the result is rank 0's."""
    import commrt

    runtime: Any = commrt
    comm = runtime.init()
    place = local_rank(comm.rank, comm.facts.layout)
    memory = open_memory(job["device"], "events", place)
    found = Parts(comm, memory).measured(int(job["nbytes"]), int(job["iterations"]))
    name = getattr(memory.device, "name", f"a device of {memory.device.kind}")
    about = {"ranks": comm.size, "device_name": name}
    return {**about, **found} if comm.rank == 0 else None


class Parts:
    """The timed calls on one rank's device."""

    def __init__(self, comm: Communicator, memory: DeviceMemory) -> None:
        self._comm, self._memory, self._device = comm, memory, memory.device

    def measured(self, nbytes: int, iterations: int) -> dict[str, Any]:
        """Return the figures of both lengths, in µs, and the two ratios."""
        long = self._long(nbytes, iterations)
        short = self._short(iterations * _MORE_SHORT)
        valid = long.pop("valid") and short.pop("valid")
        call_us = short["call_us"]
        return {
            "rows": [{"valid": bool(valid)}],
            "nbytes": nbytes,
            "long": long,
            "short": short,
            "of_slower_copy": max(long["to_host_us"], long["to_device_us"])
            / long["call_us"],
            "of_parts": call_us / sum(us for k, us in short.items() if k != "call_us"),
        }

    def _long(self, nbytes: int, iterations: int) -> dict[str, float]:
        device, stream = self._device, self._memory.stream.handle
        other = device.stream_create()
        pinned = [device.pinned_alloc(nbytes) for _ in range(2)]
        x, out = (
            self._memory.empty(nbytes // 4, np.dtype("float32")) for _ in range(2)
        )
        nbytes = x.nbytes
        self._memory.fill(x, 1)

        def to_host(on: int = stream) -> None:
            device.memcpy_async(pinned[0], x.address, nbytes, on)

        def to_device(on: int = stream) -> None:
            device.memcpy_async(out.address, pinned[1], nbytes, on)

        def on_device() -> None:
            device.memcpy_async(out.address, x.address, nbytes, stream)

        def both() -> None:
            to_host(other)
            to_device()
            device.stream_synchronize(other)

        call = self._call(x, out)
        timed = self._memory.timed
        found = {
            "to_host_us": _median(lambda: timed(to_host, 1), iterations),
            "to_device_us": _median(lambda: timed(to_device, 1), iterations),
            "both_us": _median(lambda: self._done(both), iterations),
            "on_device_us": _median(lambda: timed(on_device, 1), iterations),
            "call_us": self._together(lambda: timed(call, 1), iterations),
        }
        found["valid"] = self._is_right(out)
        device.stream_destroy(other)
        for address in pinned:
            device.pinned_free(address)
        return found

    def _short(self, iterations: int) -> dict[str, float]:
        device, stream = self._device, self._memory.stream.handle
        pinned = device.pinned_alloc(64)
        count = _SHORT_NBYTES // 4
        x, out = (self._memory.empty(count, np.dtype("float32")) for _ in range(2))
        self._memory.fill(x, 1)
        mine = np.ones(count, np.float32)
        result = np.empty_like(mine)

        def to_host() -> None:
            device.memcpy_async(pinned, x.address, _SHORT_NBYTES, stream)

        def to_device() -> None:
            device.memcpy_async(out.address, pinned, _SHORT_NBYTES, stream)

        call = self._call(x, out)
        found = {
            "to_host_us": _median(lambda: self._done(to_host), iterations),
            "host_call_us": self._together(
                lambda: _clocked(lambda: self._comm.allreduce(mine, out=result)),
                iterations,
            ),
            "to_device_us": _median(lambda: self._done(to_device), iterations),
            "events_us": _median(_Streams(device, stream).crossed_us, iterations),
        }
        if device.memory_flags:
            flags = _Flags(device, stream)
            found["flag_to_host_us"] = _median(flags.seen_us, iterations)
            found["flag_to_stream_us"] = _median(flags.released_us, iterations)
            flags.close()
        found["call_us"] = self._together(lambda: self._done(call), iterations)
        found["valid"] = self._is_right(out)
        device.pinned_free(pinned)
        return found

    def _call(self, x: Any, out: Any) -> Call:
        call: Call = self._comm.plan.allreduce(x, out=out, backend="staged")
        call()
        self._memory.drain()
        return call

    def _done(self, call: Call) -> float:
        """Return the µs from before a call until the stream is empty."""

        def to_the_end() -> None:
            call()
            self._memory.drain()

        return _clocked(to_the_end)

    def _together(self, once: Callable[[], float], iterations: int) -> float:
        """Return the median, over repetitions that all ranks begin together."""

        def after_barrier() -> float:
            self._comm.barrier()
            return once()

        return _median(after_barrier, iterations)

    def _is_right(self, out: Any) -> bool:
        found = self._memory.read(out, 0, out.size)
        return bool((found == self._comm.size).all())


class _Streams:
    """Time that a stream waits for an event of another one."""

    def __init__(self, device: Any, stream: int) -> None:
        self._device, self._from = device, stream
        self._to, self._event = device.stream_create(), device.event_create()

    def crossed_us(self) -> float:
        """Return the µs of a record, a wait, and the end of who waits."""

        def cross() -> None:
            self._device.event_record(self._event, self._from)
            self._device.stream_wait_event(self._to, self._event)
            self._device.stream_synchronize(self._to)

        return _clocked(cross)


class _Flags:
    """Time that a flag takes from a stream to the host and back."""

    def __init__(self, device: Any, stream: int) -> None:
        self._device, self._stream = device, stream
        self._said, self._gate = (device.pinned_alloc(64) for _ in range(2))
        device.flag_store(self._said, 0)
        device.flag_store(self._gate, 0)
        self._value = 0

    def seen_us(self) -> float:
        """Return the µs from telling a stream to write a flag until it is seen."""
        self._value += 1
        start = time.perf_counter_ns()
        self._device.write_value32(self._stream, self._said, self._value)
        self._until_said()
        return (time.perf_counter_ns() - start) / 1000.0

    def released_us(self) -> float:
        """Return the µs from storing a flag until a stream that waits has answered."""
        self._value += 1
        self._device.wait_value32_geq(self._stream, self._gate, self._value)
        self._device.write_value32(self._stream, self._said, self._value)
        start = time.perf_counter_ns()
        self._device.flag_store(self._gate, self._value)
        self._until_said()
        return (time.perf_counter_ns() - start) / 1000.0

    def _until_said(self) -> None:
        while self._device.flag_load(self._said) != self._value:
            self._device.pause()

    def close(self) -> None:
        """Give the flags back."""
        self._device.stream_synchronize(self._stream)
        self._device.pinned_free(self._said)
        self._device.pinned_free(self._gate)


def _clocked(call: Call) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000.0


def _median(once: Callable[[], float], iterations: int) -> float:
    once()  # warms up
    return statistics.median(once() for _ in range(iterations))


_LONG = {
    "to_host_us": "copy to the host",
    "to_device_us": "copy to the device",
    "both_us": "both at once",
    "on_device_us": "copy on the device",
    "call_us": "staged allreduce",
}
_SHORT = {
    "to_host_us": "copy to the host",
    "flag_to_host_us": "flag, stream to host",
    "host_call_us": "allreduce on the host",
    "flag_to_stream_us": "flag, host to stream and back",
    "to_device_us": "copy to the device",
    "events_us": "event between streams",
    "call_us": "staged allreduce",
}


def text(job: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the figures for people."""
    nbytes = found["nbytes"]
    wrong = "" if found["rows"][0]["valid"] else "  WRONG RESULT"
    lines = [f"# {found['device_name']}, {found['ranks']} rank(s){wrong}"]
    lines.append(f"# {nbytes} bytes: us, GB/s")
    for key, name in _LONG.items():
        us = found["long"][key]
        lines.append(f"{name:<32}{us:12.1f}{nbytes / us / 1000:10.2f}")
    lines.append(
        f"{'of the slower copy (0.85 wanted)':<32}{found['of_slower_copy']:12.2f}"
    )
    lines.append(f"# {_SHORT_NBYTES} bytes: us")
    lines += [
        f"{name:<32}{found['short'][key]:12.1f}"
        for key, name in _SHORT.items()
        if key in found["short"]
    ]
    lines.append(
        f"{'of the sum of its parts (1.5 wanted)':<38}{found['of_parts']:6.2f}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    _found = measure(json.loads(sys.argv[1]))
    if _found is not None:
        tell(_found)
