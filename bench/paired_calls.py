# SPDX-License-Identifier: Apache-2.0
"""Two calls that take turns in one launch: the machine is in one state for both.

A turn is a barrier and some milliseconds of one of them, back to back; which of the two
begins changes from turn to turn. The link between the ranks is measured before and
after: a pair during which it changed is not near or far, but ``mixed``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.comm import core_of
from commrt.job.links import link_class_now

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["PairedTimes", "time_pair"]

_TURN_S = 0.004
"""Approximate length of a turn, in which one of the calls runs again and again."""
_WARM_UPS = 3


@dataclass(frozen=True)
class PairedTimes:
    """Times of two calls on the slowest rank."""

    link_class: str
    first_us: float
    """Median over turns of the time of one call."""
    second_us: float
    ratio: float
    """Median over pairs of turns of the second's time over the first's."""


def time_pair(
    comm: Communicator, first: Callable[[], Any], second: Callable[[], Any], turns: int
) -> PairedTimes:
    """Time ``turns`` turns of each; collective, and the same result on every rank."""
    pair = first, second
    for call in pair:  # planned, and warm
        for _ in range(_WARM_UPS):
            call()
    count = _calls_per_turn(comm, first)
    before = link_class_now(core_of(comm))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            call = pair[which]
            comm.barrier()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times[which].append((time.perf_counter() - start) / count * 1e6)
    after = link_class_now(core_of(comm))
    slowest = comm.allreduce(np.array(times), op="max")
    return PairedTimes(
        before if before == after else "mixed",
        float(np.median(slowest[0])),
        float(np.median(slowest[1])),
        float(np.median(slowest[1] / slowest[0])),
    )


def _calls_per_turn(comm: Communicator, call: Callable[[], Any]) -> int:
    """Return the number of calls in a turn; the same on every rank."""
    start = time.perf_counter()
    for _ in range(_WARM_UPS):
        call()
    mine = max(1, round(_TURN_S / ((time.perf_counter() - start) / _WARM_UPS)))
    agreed = comm.allreduce(np.array([mine]), op="min")
    return int(agreed[0])
