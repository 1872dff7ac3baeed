# SPDX-License-Identifier: Apache-2.0
"""Part of a nonblocking call on a device that hides behind kernels.

The computation is kernels that copy within the device's caches. There are as many as
take as long as the communication alone. The benchmark measures three sequences, each in
one stream: the call and its wait; the kernels; the call, the kernels, and then the
wait. The host computes nothing and tests nothing, so the communication has to progress
without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from commrt.bench.device_memory import DeviceMemory
from commrt.bench.overlap import overlap_percent
from commrt.bench.timing_loop import (
    Call,
    Peer,
    Trial,
    median_interval,
    memory_of,
    numpy_dtype,
    worst_over_ranks,
)

__all__ = ["measure_overlap"]

_KERNEL_NBYTES = 1 << 20
_MOST_REPETITIONS = 200
_MOST_KERNELS = 10_000


def measure_overlap(
    peer: Peer, job: Mapping[str, Any], nbytes: int, barrier: Call
) -> dict[str, Any] | None:
    """Check and time one size; None where the size is below one element per rank."""
    trial = Trial(peer, job, nbytes)
    if trial.empty:
        return None
    bind: Any = peer
    submit = bind.bind_nonblocking(trial.coll, trial.x, trial.out, trial.root)

    def call() -> None:
        submit().wait()

    trial.call = call
    row: dict[str, Any] = {"nbytes": nbytes, "elements": trial.num_x, "calls": 1}
    wrong = worst_over_ranks(peer, [float(not trial.is_right())])
    row["valid"] = not peer.agree(max(wrong, default=0.0))
    if not row["valid"]:
        row["error"] = "the result differs from the expected one; not timed"
        return row
    trial.rewrite(0)
    memory = cast(DeviceMemory, memory_of(peer))
    for _ in range(job["warmup"]):
        trial.call()
    kernels = _Kernels(memory)

    def overall() -> None:
        request = submit()
        kernels()
        request.wait()

    timed = _Timed(trial, memory, barrier, bool(job["fresh"]))
    pure_us = timed.agreed(trial.call, 5)
    kernels.last(timed.agreed, pure_us)
    both_us = pure_us + timed.agreed(kernels, 3)
    fitting = int(job["budget_s"] * 1e6 / (2 * max(both_us, 1.0)))
    number = max(3, min(int(job["iterations"]), _MOST_REPETITIONS, fitting))
    # In turns: a device that changes its clocks does so for all three.
    rounds = [
        [timed(each) for each in (trial.call, kernels, overall)] for _ in range(number)
    ]
    _summarise(peer, row, rounds)
    return row


class _Kernels:
    """Copies on the device, so many launches of them."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._device, self._stream = memory.device, memory.stream.handle
        dtype = numpy_dtype("uint8")
        self._from, self._to = (memory.empty(_KERNEL_NBYTES, dtype) for _ in range(2))
        memory.fill(self._from, 1)
        self.number = 1

    def __call__(self) -> None:
        """Give all of them to the stream."""
        target, source = self._to.address, self._from.address
        for _ in range(self.number):
            self._device.launch_copy(target, source, _KERNEL_NBYTES, self._stream)

    def last(self, timed_us: Callable[[Call, int], float], wanted_us: float) -> None:
        """Set their number so that they take as long as wanted; equal on all ranks."""
        self()
        for _ in range(3):
            each_us = max(timed_us(self, 3), 1e-3) / self.number
            self.number = max(1, min(_MOST_KERNELS, math.ceil(wanted_us / each_us)))


class _Timed:
    """Times one call after a barrier."""

    def __init__(
        self, trial: Trial, memory: DeviceMemory, barrier: Call, fresh: bool
    ) -> None:
        self._trial, self._memory = trial, memory
        self._barrier, self._fresh = barrier, fresh

    def __call__(self, call: Call) -> float:
        """Return this rank's µs."""
        if self._fresh:
            self._trial.rewrite(1)
            self._memory.drain()
        self._barrier()
        return self._memory.timed(call, 1)

    def agreed(self, call: Call, times: int) -> float:
        """Return the median of some, of the slowest rank, on all ranks."""
        peer = self._trial.peer
        slowest = worst_over_ranks(peer, [self(call) for _ in range(times)])
        return peer.agree(median_interval(slowest)[0] if slowest else 0.0)


def _summarise(peer: Peer, row: dict[str, Any], rounds: list[list[float]]) -> None:
    """Fill the row on rank 0: medians over repetitions of means over ranks."""
    names = ("pure_us", "compute_us", "overall_us")
    for index, name in enumerate(names):
        ranks = peer.gather([each[index] for each in rounds])
        if not ranks:
            continue
        means = [sum(times) / peer.size for times in zip(*ranks, strict=True)]
        row[name] = median_interval(means)[0]
        if name == "pure_us":
            each = [median_interval(times)[0] for times in ranks]
            row["pure_min_us"], row["pure_max_us"] = min(each), max(each)
        if name == "overall_us":
            row["samples_us"] = [round(mean, 4) for mean in means]
    if peer.rank != 0:
        return
    row["init_us"] = row["test_us"] = row["wait_us"] = 0.0  # the host does nothing
    row["overlap_percent"] = overlap_percent(
        row["overall_us"], row["compute_us"], 0.0, row["pure_us"]
    )
    row["median_us"], row["low_us"], row["high_us"] = median_interval(row["samples_us"])
