# SPDX-License-Identifier: Apache-2.0
"""Point-to-point between ranks 0 and 1: latency, bandwidth, bidirectional bandwidth.

OSU's shapes: latency is half a round trip; bandwidth is a window of nonblocking sends
answered by one short message; bidirectional has a window in each direction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from commrt.bench.timing_loop import Call, Peer, median_interval, numpy_dtype

__all__ = ["measure_bandwidth", "measure_latency"]

_DATA_TAG, _ANSWER_TAG = 1, 2


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
    received.fill(0)

    def round_trips(count: int) -> None:
        for _ in range(count):
            if job["fresh"]:
                x.fill(1)
            if peer.rank == 0:
                comm.send(x, dest=other, tag=_DATA_TAG)
                comm.recv(received, source=other, tag=_DATA_TAG)
            else:
                comm.recv(received, source=other, tag=_DATA_TAG)
                comm.send(x, dest=other, tag=_DATA_TAG)

    x.fill(7)
    row = _measure(peer, job, barrier, round_trips, trips_per_call=2)
    row.update(nbytes=nbytes, elements=int(x.size))
    row["valid"] = _arrived(peer, received, x)
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
    received.fill(0)
    answer = np.zeros(1, np.uint8)

    def windows(count: int) -> None:
        for _ in range(count):
            if job["fresh"] and sends:
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

    x.fill(7)
    row = _measure(peer, job, barrier, windows, trips_per_call=1)
    row.update(nbytes=nbytes, elements=int(x.size), window=window)
    row["valid"] = _arrived(peer, received, x) if receives else _arrived(peer, x, x)
    if "median_us" in row:
        moved = x.nbytes * window * (2 if both else 1)
        row["MBps"] = moved / row["median_us"]
    return row


def _measure(
    peer: Peer,
    job: Mapping[str, Any],
    barrier: Call,
    run: Any,
    trips_per_call: int,
) -> dict[str, Any]:
    """Repeat ``run(calls)`` on ranks 0 and 1; return rank 0's times."""
    active = peer.rank < 2
    calls, estimate_us = max(1, int(job["warmup"])), 0.0
    for _ in range(2):
        estimate_us = max(peer.agree(_timed(run, active, barrier, calls)), 1e-3)
        calls = max(1, math.ceil(float(job["floor_us"]) / estimate_us))
    fitting = int(job["budget_s"] * 1e6 / (calls * estimate_us))
    repetitions = max(3, min(int(job["iterations"]), fitting, 500))
    samples = [_timed(run, active, barrier, calls) for _ in range(repetitions)]
    row: dict[str, Any] = {"calls": calls}
    if peer.rank == 0:
        row["samples_us"] = [round(us / trips_per_call, 4) for us in samples]
        row["median_us"], row["low_us"], row["high_us"] = median_interval(
            row["samples_us"]
        )
    return row


def _timed(run: Any, active: bool, barrier: Call, calls: int) -> float:
    barrier()
    start = time.perf_counter_ns()
    if active:
        run(calls)
    return (time.perf_counter_ns() - start) / calls / 1000.0


def _arrived(peer: Peer, received: Any, sent: Any) -> bool:
    """Whether both ranks hold what the other sent, known to rank 0."""
    right = peer.rank > 1 or bool(np.array_equal(received, sent))
    rows = peer.gather([float(right)])
    return bool(rows) and all(row[0] for row in rows or [])
