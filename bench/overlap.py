# SPDX-License-Identifier: Apache-2.0
"""Nonblocking collectives: how much of the communication hides behind computation.

OSU's method: measure the pure communication (submit and wait), then submit, compute
for as long as that took, and wait. The computation spins on the clock, so it lasts
exactly as long as asked, on any machine; it touches no memory, so it competes for the
CPU but not for the caches.
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

__all__ = ["PHASES", "measure_overlap", "overlap_percent"]

PHASES = ("overall_us", "compute_us", "init_us", "test_us", "wait_us")
"""Figures of each repetition beside the pure communication."""


def overlap_percent(
    overall_us: float, compute_us: float, test_us: float, pure_us: float
) -> float:
    """Return the share of the communication that computation hid, in percent.

    Args:
        overall_us: submit, compute with its tests, and wait.
        compute_us: the computation with its tests.
        test_us: the tests alone.
        pure_us: submit and wait with nothing between.
    """
    if pure_us <= 0:
        return 0.0
    return max(0.0, 100 * (1 - (overall_us - (compute_us - test_us)) / pure_us))


def measure_overlap(
    peer: Peer, job: Mapping[str, Any], nbytes: int, barrier: Call
) -> dict[str, Any] | None:
    """Check and time one size; None where the size is below one element per rank."""
    trial = Trial(peer, job, nbytes)
    if trial.empty:
        return None
    row: dict[str, Any] = {"nbytes": nbytes, "elements": trial.num_x}
    bind: Any = peer
    submit = bind.bind_nonblocking(trial.coll, trial.x, trial.out, trial.root)
    trial.call = lambda: submit().wait()
    row["valid"] = not peer.agree(
        max(worst_over_ranks(peer, [float(not trial.is_right())]), default=0.0)
    )
    if not row["valid"]:
        row["error"] = "the result differs from the expected one; not timed"
        return row
    fresh = bool(job["fresh"])
    trial.rewrite(0)
    for _ in range(job["warmup"]):
        trial.call()
    repetitions = _repetitions(trial, barrier, job)
    pure = [_pure(trial, barrier, fresh, i) for i in range(repetitions)]
    rows = peer.gather(pure)
    everyone = [sum(times) / peer.size for times in zip(*rows or [], strict=True)]
    pure_us = peer.agree(median_interval(everyone)[0] if everyone else 0.0)
    phases = [
        _phases(submit, trial, barrier, pure_us, job, i) for i in range(repetitions)
    ]
    _summarise(peer, row, pure_us, rows, phases)
    return row


def _repetitions(trial: Trial, barrier: Call, job: Mapping[str, Any]) -> int:
    """Return the number of repetitions that fit the budget, the same on all ranks."""
    once = worst_over_ranks(trial.peer, [_pure(trial, barrier, False, 0)])
    estimate_us = max(trial.peer.agree(once[0] if once else 0.0), 1e-3)
    # Pure, then overall, which lasts about twice as long.
    fitting = int(job["budget_s"] * 1e6 / (3 * estimate_us))
    return max(3, min(int(job["iterations"]), 200, fitting))


def _pure(trial: Trial, barrier: Call, fresh: bool, index: int) -> float:
    if fresh:
        trial.rewrite(index & 1)
    barrier()
    start = time.perf_counter_ns()
    trial.call()
    return (time.perf_counter_ns() - start) / 1000.0


def _phases(
    submit: Any,
    trial: Trial,
    barrier: Call,
    pure_us: float,
    job: Mapping[str, Any],
    index: int,
) -> list[float]:
    """Return this rank's µs of one repetition, in the order of ``PHASES``."""
    if job["fresh"]:
        trial.rewrite(index & 1)
    clock = time.perf_counter_ns
    num_tests = int(job["num_tests"])
    slice_ns = int(pure_us * 1000 / (num_tests + 1))
    test_ns = 0
    barrier()
    start = clock()
    request = submit()
    submitted = clock()
    for part in range(num_tests + 1):
        end = clock() + slice_ns
        while clock() < end:
            pass
        if part < num_tests:
            before = clock()
            request.test()
            test_ns += clock() - before
    computed = clock()
    request.wait()
    done = clock()
    parts = (
        done - start,
        computed - submitted,
        submitted - start,
        test_ns,
        done - computed,
    )
    return [part / 1000.0 for part in parts]


def _summarise(
    peer: Peer,
    row: dict[str, Any],
    pure_us: float,
    pure: list[list[float]] | None,
    phases: list[list[float]],
) -> None:
    """Fill the row on rank 0: medians over repetitions of means over ranks."""
    for index, name in enumerate(PHASES):
        rows = peer.gather([phase[index] for phase in phases])
        if rows:
            means = [sum(times) / peer.size for times in zip(*rows, strict=True)]
            row[name] = median_interval(means)[0]
            if name == "overall_us":
                row["samples_us"] = [round(mean, 4) for mean in means]
    if pure:
        row["pure_us"] = pure_us
        per_rank = [median_interval(times)[0] for times in pure]
        row["pure_min_us"], row["pure_max_us"] = min(per_rank), max(per_rank)
        row["overlap_percent"] = overlap_percent(
            row["overall_us"], row["compute_us"], row["test_us"], pure_us
        )
        row["median_us"], row["low_us"], row["high_us"] = median_interval(
            row["samples_us"]
        )
        row["calls"] = 1
