# SPDX-License-Identifier: Apache-2.0
"""``measured_costs``: times of this job's collectives, for the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.errors import UsageError, shown
from commrt.oracle.clocks import ClockName, Stopwatch
from commrt.oracle.costs import MeasuredCosts
from commrt.oracle.transfers import MESSAGE

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["SIZES", "measured_costs"]

SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 22, 24))
"""Bytes of the whole vector that are measured: 1 KiB to 16 MiB."""
_ITEM = 4


def measured_costs(
    comm: Communicator,
    *,
    sizes: Sequence[int] = SIZES,
    clock: ClockName = "wall",
    window_s: float = 0.02,
    rounds: int = 3,
) -> MeasuredCosts:
    """Return the times of allreduce, allgather, reduce_scatter, alltoall and messages.

    Collective. Ranks are measured in groups of each size that divides their number, for
    each stride in which such groups lie in the job. All groups of a form run at one
    time, so what they cost each other is in the times. Ranks write to their arrays
    before each call, as training does.

    Args:
        comm: the ranks.
        sizes: bytes of the whole vectors.
        clock: ``wall``, or ``cores`` where other programs share them.
        window_s: seconds of each measurement.
        rounds: measurements, of which the least counts: other programs only add time.

    Raises:
        UsageError: there is one rank only, or ``sizes`` is empty.
    """
    if comm.size < 2:
        raise UsageError("measured_costs: one rank sends nothing; start two or more")
    if not sizes or min(sizes) < 1:
        raise UsageError(f"measured_costs: sizes is {shown(sizes)}; expected bytes")
    watch = Stopwatch(comm, clock=clock, window_s=window_s, rounds=rounds)
    found: dict[tuple[str, int, int], tuple[tuple[int, float], ...]] = {}
    for ranks in _divisors(comm.size):
        for stride in _divisors(comm.size // ranks, least=1):
            base = comm.rank // (ranks * stride) * stride + comm.rank % stride
            group = comm.split(base, comm.rank)
            assert group is not None
            for coll, make in _CALLS.items():
                points = {}
                for nbytes in sizes:
                    count = max(1, nbytes // (_ITEM * ranks))
                    call = make(group, count)
                    points[_nbytes(coll, count, ranks)] = watch.together_s(call)
                found[coll, ranks, stride] = tuple(sorted(points.items()))
            group.free()
    return MeasuredCosts(found, f"measured by {comm.size} ranks, clock {clock}")


def _divisors(number: int, least: int = 2) -> list[int]:
    return [each for each in range(least, number + 1) if number % each == 0]


def _nbytes(coll: str, count: int, ranks: int) -> int:
    """Return the bytes of a whole vector of so many elements for each rank."""
    return _ITEM * count * (1 if coll == MESSAGE else ranks)


def _allreduce(group: Communicator, count: int) -> Callable[[], object]:
    x = np.zeros(count * group.size, np.float32)
    return lambda: _fresh(x) and group.allreduce(x)


def _allgather(group: Communicator, count: int) -> Callable[[], object]:
    x, out = np.zeros(count, np.float32), np.zeros(count * group.size, np.float32)
    return lambda: _fresh(x) and group.allgather(x, out=out)


def _reduce_scatter(group: Communicator, count: int) -> Callable[[], object]:
    x, out = np.zeros(count * group.size, np.float32), np.zeros(count, np.float32)
    return lambda: _fresh(x) and group.reduce_scatter(x, out=out)


def _alltoall(group: Communicator, count: int) -> Callable[[], object]:
    x = np.zeros(count * group.size, np.float32)
    out = np.zeros_like(x)
    return lambda: _fresh(x) and group.alltoall(x, out=out)


def _message(group: Communicator, count: int) -> Callable[[], object]:
    x, out = np.zeros(count, np.float32), np.zeros(count, np.float32)
    behind, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return lambda: _fresh(x) and group.sendrecv(x, behind, out, before)


_CALLS: dict[str, Callable[[Any, int], Callable[[], object]]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _alltoall,
    MESSAGE: _message,
}


def _fresh(x: np.ndarray[Any, Any]) -> bool:
    """Write to an array, as a computation before a call does."""
    x.fill(1.0)
    return True
