# SPDX-License-Identifier: Apache-2.0
"""The time that a call takes its caller when it waits for nobody.

A nonblocking call: from the call to the request in hand. A blocking one: a short
broadcast at its root, from the call through the store that the peer sees and back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from commrt.bench.timing_loop import (
    Call,
    Peer,
    Trial,
    median_interval,
    worst_over_ranks,
)

__all__ = ["clock_cost_us", "measure_root_call", "measure_submit"]

_STREAM = 16
"""Broadcasts of a repetition: well below what a root may be ahead of the others."""


def clock_cost_us() -> float:
    """Return the µs that reading the clock twice adds to a measurement."""
    clock = time.perf_counter_ns
    pairs = [-(clock() - clock()) for _ in range(1001)]
    return sorted(pairs)[500] / 1000.0


def measure_submit(
    peer: Peer, job: Mapping[str, Any], nbytes: int, barrier: Call
) -> dict[str, Any] | None:
    """Time the submission alone; the wait that follows is outside the clock.

    The cost of the clock itself, measured in the same process, is subtracted.
    """
    trial = Trial(peer, job, nbytes)
    if trial.empty:
        return None
    bind: Any = peer
    submit = bind.bind_nonblocking(trial.coll, trial.x, trial.out, trial.root)
    trial.call = lambda: submit().wait()
    row = _warm_row(peer, job, nbytes, trial)
    if not row["valid"]:
        return row
    clock, overhead_us = time.perf_counter_ns, clock_cost_us()
    mine: list[float] = []
    for _ in range(job["iterations"]):
        barrier()
        start = clock()
        request = submit()
        mine.append((clock() - start) / 1000.0 - overhead_us)
        request.wait()
        trial.memory.drain()
    return _with_samples(row, worst_over_ranks(peer, mine))


def measure_root_call(
    peer: Peer, job: Mapping[str, Any], nbytes: int, barrier: Call
) -> dict[str, Any] | None:
    """Time blocking broadcasts at their root, which is done once it has stored.

    Other ranks take part; only the root's time counts.
    """
    trial = Trial(peer, job, nbytes)
    if trial.empty:
        return None
    row = _warm_row(peer, job, nbytes, trial)
    if not row["valid"]:
        return row
    clock, overhead_us = time.perf_counter_ns, clock_cost_us()
    call = trial.call
    mine: list[float] = []
    for _ in range(job["iterations"]):
        barrier()
        start = clock()
        for _ in range(_STREAM):
            call()
        mine.append(((clock() - start) / 1000.0 - overhead_us) / _STREAM)
    return _with_samples(row, mine if peer.rank == trial.root else [])


def _warm_row(
    peer: Peer, job: Mapping[str, Any], nbytes: int, trial: Trial
) -> dict[str, Any]:
    """Check the result and warm up; return the row without its times."""
    row: dict[str, Any] = {"nbytes": nbytes, "elements": trial.num_x, "calls": 1}
    row["valid"] = not peer.agree(
        max(worst_over_ranks(peer, [float(not trial.is_right())]), default=0.0)
    )
    if not row["valid"]:
        row["error"] = "the result differs from the expected one; not timed"
        return row
    trial.rewrite(0)
    for _ in range(job["warmup"]):
        trial.call()
    return row


def _with_samples(row: dict[str, Any], samples: list[float]) -> dict[str, Any]:
    if samples:
        row["samples_us"] = [round(sample, 4) for sample in samples]
        row["median_us"], row["low_us"], row["high_us"] = median_interval(samples)
    return row
