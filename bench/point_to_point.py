# SPDX-License-Identifier: Apache-2.0
"""Point-to-point between ranks 0 and 1: latency, bandwidth, bidirectional bandwidth.

OSU's shapes: latency is half a round trip; bandwidth is a window of nonblocking sends
answered by one short message; bidirectional has a window in each direction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from commrt.bench.timing_loop import (
    Array,
    Call,
    Peer,
    expected_chunk,
    median_interval,
    numpy_dtype,
    worst_over_ranks,
)

__all__ = ["measure_bandwidth", "measure_latency"]

_DATA_TAG, _ANSWER_TAG = 1, 2

Run = Callable[[int, bool], None]
"""So many exchanges, with inputs rewritten before each or not."""


def measure_latency(
    peer: Peer, job: Mapping[str, Any], nbytes: int, barrier: Call
) -> dict[str, Any] | None:
    """Time half a round trip of one size; ranks above 1 only keep the barriers."""
    dtype = numpy_dtype(job["dtype"])
    if nbytes < dtype.itemsize:
        return None
    here: Any = peer
    comm, other = here.comm, 1 - peer.rank
    x = np.empty(nbytes // dtype.itemsize, dtype)
    received = np.empty_like(x)

    def round_trips(count: int, fresh: bool) -> None:
        for _ in range(count):
            if fresh:
                x.fill(1)
            if peer.rank == 0:
                comm.send(x, dest=other, tag=_DATA_TAG)
                comm.recv(received, source=other, tag=_DATA_TAG)
            else:
                comm.recv(received, source=other, tag=_DATA_TAG)
                comm.send(x, dest=other, tag=_DATA_TAG)

    row: dict[str, Any] = {"nbytes": nbytes, "elements": int(x.size)}
    if _check(peer, row, round_trips, x, received):
        _measure(peer, job, barrier, round_trips, 2, row)
    return row


def measure_bandwidth(
    peer: Peer, job: Mapping[str, Any], nbytes: int, barrier: Call
) -> dict[str, Any] | None:
    """Time windows of nonblocking messages of one size; one way, or both for bibw."""
    dtype = numpy_dtype(job["dtype"])
    if nbytes < dtype.itemsize:
        return None
    both, window = job["mode"] == "bibw", int(job["window"])
    here: Any = peer
    comm, other = here.comm, 1 - peer.rank
    sends = both or peer.rank == 0
    receives = both or peer.rank == 1
    x = np.empty(nbytes // dtype.itemsize, dtype)
    # As in OSU, all receives of a window write one buffer.
    received = np.empty_like(x)
    answer = np.zeros(1, np.uint8)

    def windows(count: int, fresh: bool) -> None:
        for _ in range(count):
            if fresh and sends:
                x.fill(7)
            pending = []
            for _ in range(window if receives else 0):
                pending.append(
                    comm.recv(received, source=other, tag=_DATA_TAG, nonblocking=True)
                )
            for _ in range(window if sends else 0):
                pending.append(
                    comm.send(x, dest=other, tag=_DATA_TAG, nonblocking=True)
                )
            for request in pending:
                request.wait()
            if peer.rank == 0:
                comm.recv(answer, source=other, tag=_ANSWER_TAG)
            else:
                comm.send(answer, dest=other, tag=_ANSWER_TAG)

    row: dict[str, Any] = {"nbytes": nbytes, "elements": int(x.size)}
    row["window"] = window
    if _check(peer, row, windows, x, received if receives else None):
        _measure(peer, job, barrier, windows, 1, row)
    if "median_us" in row:
        moved = x.nbytes * window * (2 if both else 1)
        row["MBps"] = moved / row["median_us"]
    return row


def _check(
    peer: Peer, row: dict[str, Any], run: Run, x: Array, received: Array | None
) -> bool:
    """Exchange known data once; return, and note, whether it arrived everywhere."""
    right = True
    if peer.rank < 2:
        x[:] = _known(peer.rank, x)
        if received is not None:
            received.fill(0)
        run(1, False)
        if received is not None:
            right = bool(np.array_equal(received, _known(1 - peer.rank, x)))
    wrong = worst_over_ranks(peer, [float(not right)])
    row["valid"] = not peer.agree(max(wrong, default=0.0))
    if not row["valid"]:
        row["error"] = "what arrived differs from what was sent; not timed"
    return bool(row["valid"])


def _known(rank: int, x: Array) -> Array:
    """Return what ``rank`` sends: different on each of the two."""
    known = expected_chunk("bcast", rank, 2, rank, x.size, 0, x.size)
    return known.astype(x.dtype)


def _measure(
    peer: Peer,
    job: Mapping[str, Any],
    barrier: Call,
    run: Run,
    trips_per_call: int,
    row: dict[str, Any],
) -> None:
    """Repeat ``run`` on ranks 0 and 1; fill the row with rank 0's times."""
    active, fresh = peer.rank < 2, bool(job["fresh"])
    if active:
        run(int(job["warmup"]), fresh)
    calls, estimate_us = 3, 0.0
    for _ in range(3):
        estimate_us = max(peer.agree(_timed(run, active, barrier, calls, fresh)), 1e-3)
        calls = max(1, math.ceil(float(job["floor_us"]) / estimate_us))
    fitting = int(job["budget_s"] * 1e6 / (calls * estimate_us))
    repetitions = max(3, min(int(job["iterations"]), fitting, 500))
    samples = [_timed(run, active, barrier, calls, fresh) for _ in range(repetitions)]
    row["calls"] = calls
    if peer.rank == 0:
        row["samples_us"] = [round(us / trips_per_call, 4) for us in samples]
        row["median_us"], row["low_us"], row["high_us"] = median_interval(
            row["samples_us"]
        )


def _timed(run: Run, active: bool, barrier: Call, calls: int, fresh: bool) -> float:
    barrier()
    start = time.perf_counter_ns()
    if active:
        run(calls, fresh)
    return (time.perf_counter_ns() - start) / calls / 1000.0
