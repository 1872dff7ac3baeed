# SPDX-License-Identifier: Apache-2.0
"""Point-to-point between ranks 0 and 1: latency, bandwidth, bidirectional bandwidth.

OSU's shapes: latency is half a round trip; bandwidth is a window of nonblocking sends
answered by one short message; bidirectional has a window in each direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from commrt.bench.timing_loop import (
    Array,
    Call,
    Memory,
    Peer,
    median_interval,
    memory_of,
    numpy_dtype,
    pattern,
    worst_over_ranks,
)

__all__ = ["measure_bandwidth", "measure_latency"]

_DATA_TAG, _ANSWER_TAG = 1, 2

Run = Callable[[int, bool], None]
"""Function that makes so many exchanges, with inputs rewritten before each or not."""


def measure_latency(
    peer: Peer, job: Mapping[str, Any], nbytes: int, barrier: Call
) -> dict[str, Any] | None:
    """Time half a round trip of one size; ranks above 1 only keep the barriers."""
    dtype = numpy_dtype(job["dtype"])
    if nbytes < dtype.itemsize:
        return None
    here: Any = peer
    comm, other = here.comm, 1 - peer.rank
    memory = memory_of(peer)
    x, received = (memory.empty(nbytes // dtype.itemsize, dtype) for _ in range(2))

    def round_trips(count: int, fresh: bool) -> None:
        for _ in range(count):
            if fresh:
                memory.fill(x, 1)
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
    memory = memory_of(peer)
    # As in OSU, all receives of a window write one buffer.
    x, received = (memory.empty(nbytes // dtype.itemsize, dtype) for _ in range(2))
    answer = memory.empty(1, np.dtype(np.uint8))

    def windows(count: int, fresh: bool) -> None:
        for _ in range(count):
            if fresh and sends:
                memory.fill(x, 7)
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
        moved = int(x.nbytes) * window * (2 if both else 1)
        row["MBps"] = moved / row["median_us"]
    return row


def _check(
    peer: Peer, row: dict[str, Any], run: Run, x: Array, received: Array | None
) -> bool:
    """Exchange known data once; return, and note, whether it arrived everywhere."""
    right, memory = True, memory_of(peer)
    if peer.rank < 2:
        memory.write(x, 0, _known(peer.rank, x))
        if received is not None:
            memory.fill(received, 0)
        run(1, False)
        if received is not None:
            found = memory.read(received, 0, received.size)
            right = bool(np.array_equal(found, _known(1 - peer.rank, x)))
    wrong = worst_over_ranks(peer, [float(not right)])
    row["valid"] = not peer.agree(max(wrong, default=0.0))
    if not row["valid"]:
        row["error"] = "what arrived differs from what was sent; not timed"
    return bool(row["valid"])


def _known(rank: int, x: Array) -> Array:
    """Return the content that ``rank`` sends: different on each of the two."""
    known = pattern(rank, 0, x.size)
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
    memory = memory_of(peer)
    if active:
        run(int(job["warmup"]), fresh)
    calls, estimate_us = 3, 0.0
    for _ in range(3):
        once_us = _timed(memory, run, active, barrier, calls, fresh)
        estimate_us = max(peer.agree(once_us), 1e-3)
        calls = max(1, math.ceil(float(job["floor_us"]) / estimate_us))
    fitting = int(job["budget_s"] * 1e6 / (calls * estimate_us))
    repetitions = max(3, min(int(job["iterations"]), fitting, 500))
    samples = [
        _timed(memory, run, active, barrier, calls, fresh) for _ in range(repetitions)
    ]
    row["calls"] = calls
    if peer.rank == 0:
        row["samples_us"] = [round(us / trips_per_call, 4) for us in samples]
        row["median_us"], row["low_us"], row["high_us"] = median_interval(
            row["samples_us"]
        )


def _timed(
    memory: Memory, run: Run, active: bool, barrier: Call, calls: int, fresh: bool
) -> float:
    """Return the µs of one of so many exchanges in a row."""
    barrier()
    return memory.timed(partial(run, calls, fresh), 1) / calls if active else 0.0
