# SPDX-License-Identifier: Apache-2.0
"""Length of buckets: the shortest one that costs little time in all.

A long bucket starts late, as it waits for its last gradient, and nothing hides the last
bucket of a step. Short buckets cost more in all. So a bucket is as long as it takes
until longer ones stop saving. That is the shortest length at which two buckets joined
into one save less than a tenth of their time. The saving must stay below a tenth at
every greater length, and the time includes what a bucket costs its caller.

The times come from the selection table, if it has them for these ranks. Else the ranks
measure them, which takes some hundredths of a second. Both are equal on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from commrt.comm import core_of
from commrt.select.facts import Query

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = [
    "SIZES",
    "allreduce_times_us",
    "best_bucket_nbytes",
    "interpolated_us",
    "longest_that_pays",
]

SIZES = tuple(1 << power for power in range(16, 26))
"""Bytes that are looked at: 64 KiB to 32 MiB."""
_DEFAULT_NBYTES = 4 << 20
"""Bytes of a bucket if no times are at hand; ``fused()`` has the same default."""
_CALL_US = 20.0
"""Time that a bucket costs its caller beside the operation: calls in Python."""
_SAVING = 0.1
_REPETITIONS = 3
_ENOUGH_S = 0.05
"""Longer sizes are not measured once one call takes so long."""


def best_bucket_nbytes(comm: Communicator, *, device: str = "host") -> int:
    """Return the bytes that a bucket of gradients should have; collective.

    Args:
        comm: whose ranks sum them.
        device: ``cuda`` for arrays on devices, which are not measured: without a table
            for them it is 4 MiB.
    """
    points = allreduce_times_us(comm, device=device)
    return longest_that_pays(points) if len(points) > 1 else _DEFAULT_NBYTES


def allreduce_times_us(
    comm: Communicator, *, device: str = "host"
) -> Mapping[int, float]:
    """Return microseconds of an allreduce by its bytes; collective.

    None at all of one rank, nor of devices without a table for them.
    """
    if comm.size == 1:
        return {}
    points = _tabled_us(comm, device)
    if device == "host" and not _covers(points):
        points = _measured_us(comm)
    return points


def longest_that_pays(points: Mapping[int, float]) -> int:
    """Return the shortest length from which on joining two buckets saves too little.

    Args:
        points: microseconds of an allreduce by its bytes; two or more.
    """
    best = max(size for size in SIZES if size <= max(points) or size == SIZES[0])
    for size in reversed([size for size in SIZES if 2 * size <= max(points)]):
        apart = 2 * (interpolated_us(points, size) + _CALL_US)
        joined = interpolated_us(points, 2 * size) + _CALL_US
        if joined < (1 - _SAVING) * apart:
            break
        best = size
    return best


def interpolated_us(points: Mapping[int, float], nbytes: int) -> float:
    """Return the time at ``nbytes``, on lines between the points."""
    sizes = sorted(points)
    if not sizes:
        return 0.0
    return float(np.interp(nbytes, sizes, [points[size] for size in sizes]))


def _covers(points: Mapping[int, float]) -> bool:
    return bool(points) and min(points) <= SIZES[0] and max(points) >= SIZES[-2]


def _tabled_us(comm: Communicator, device: str) -> dict[int, float]:
    """Return the times that the table's rules for these ranks have measured."""
    table = core_of(comm).world.table
    points: dict[int, float] = {}
    if table is None:
        return points
    for size in SIZES:
        query = Query("allreduce", size, "float32", device=device, op="sum")
        hit = table.lookup(comm.facts, query)
        if hit is None or hit.extrapolated or hit.rule.evidence is None:
            continue
        points |= {point.nbytes: point.us for point in hit.rule.evidence.points}
    return points


def _measured_us(comm: Communicator) -> dict[int, float]:
    """Return the times of the slowest rank; all ranks stop at the same size."""
    points: dict[int, float] = {}
    for size in SIZES:
        x = np.zeros(size // 4, np.float32)
        comm.allreduce(x)  # makes the plan, and touches its memory
        start = time.perf_counter()
        for _ in range(_REPETITIONS):
            comm.allreduce(x)
        mine = np.array([(time.perf_counter() - start) / _REPETITIONS])
        slowest = float(comm.allreduce(mine, op="max")[0])
        points[size] = slowest * 1e6
        if slowest > _ENOUGH_S:
            break
    return points
