# SPDX-License-Identifier: Apache-2.0
"""The default without a table: a latency-bandwidth model that is always there.

The model only has to avoid bad choices; ``commrt-tune`` replaces it by measurements.
Its constants are round numbers near what collectives took on two cores of a small
virtual machine (docs/performance.md), not promises about any other machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from commrt.select.facts import CommFacts, LinkClass

__all__ = [
    "GAMMA",
    "BetweenNodes",
    "Carrier",
    "Constants",
    "MpiBetweenNodes",
    "Points",
    "cheapest",
    "constants",
    "interpolated",
]

Carrier = Literal["memory", "messages"]
"""True if ranks read each other's memory; False if a library carries messages."""
One = TypeVar("One")


@dataclass(frozen=True)
class Constants:
    """The model's constants."""

    alpha_us: float
    """Time of a message; on one node multiplied by the ranks that share a core."""
    beta_us: float
    """Time per byte that a core copies, or that a port moves between nodes."""
    gamma_us: float
    """Time per byte reduced."""


GAMMA = 1e-5
"""Microseconds per byte that one core reduces."""
_CONSTANTS: dict[tuple[LinkClass, Carrier], Constants] = {
    ("single", "memory"): Constants(0.25, 2e-5, GAMMA),
    ("single", "messages"): Constants(0.7, 6e-5, GAMMA),
    ("near", "memory"): Constants(0.25, 2e-5, GAMMA),
    ("near", "messages"): Constants(0.7, 6e-5, GAMMA),
    ("far", "memory"): Constants(0.5, 4e-5, GAMMA),
    ("far", "messages"): Constants(1.0, 8e-5, GAMMA),
    # A round costs a hand-over of the core to the next rank.
    ("oversubscribed", "memory"): Constants(2.0, 3e-5, 1.5 * GAMMA),
    ("oversubscribed", "messages"): Constants(3.0, 6e-5, 1.5 * GAMMA),
    # Between nodes, where nobody measured: commrt/job/links.py does so for gloo, and
    # commrt/backends/mpi/measuring.py for MPI.
    ("network", "memory"): Constants(2.0, 1.5e-4, 2 * GAMMA),
    ("network", "messages"): Constants(2.0, 1.5e-4, 2 * GAMMA),
}


@dataclass(frozen=True)
class BetweenNodes:
    """Cost of messages that MPI does not carry, as ranks measure it when they meet."""

    alpha_us: float
    """Time of a short message, from the call that sends it to the one that receives
    it."""
    beta_us: float
    """Time per byte of a long message from memory to memory, while one comes back."""
    native_us: float
    """Time of a message within gloo's own collectives; their start counts as one
    more."""
    is_staged: bool = True
    """Both sides copy messages of schedules, as where gloo carries them."""


Points = tuple[tuple[int, float], ...]
"""Numbers of bytes in ascending order, and what is known of each."""


@dataclass(frozen=True)
class MpiBetweenNodes:
    """Cost between nodes where there is MPI, as ranks measure it when they meet.

    MPI carries the messages, or connections of commrt's own do.
    """

    alpha_us: float
    """Time of a short message."""
    beta_us: float
    """Time per byte of a long message, while one comes back."""
    native_us: Mapping[str, Points] = field(default_factory=dict)
    """Time of the library's own collectives, by operation and rule bytes."""
    facts: CommFacts | None = None
    """The ranks that measured."""
    long_beta_us: float = 0.0
    """Time per byte of a message that is longer than those vectors. It may be larger:
    a bucket of tokens lets short ones pass at once."""

    def native_part(
        self, coll: str, nbytes: int, best_us: Callable[[CommFacts, int], float]
    ) -> float:
        """Return the time of the library's collective in times of the best schedule's.

        Between two lengths that were measured it changes with the logarithm of the
        length; beyond them it stays. 1.0 for an operation that was not measured.

        Args:
            coll: the operation.
            nbytes: its rule bytes.
            best_us: predicts the best schedule on some ranks, for so many rule bytes.
        """
        took = self.native_us.get(coll)
        if not took or self.facts is None:
            return 1.0
        parts = [
            (at, max(us, _LEAST_US) / max(best_us(self.facts, at), _LEAST_US))
            for at, us in took
        ]
        return interpolated(parts, nbytes)


_LEAST_US = 1e-3


def interpolated(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    """Return what holds between points; before and beyond them, what holds there."""
    before = points[0]
    for point in points:
        if nbytes <= point[0]:
            first, last, here = (max(n, 1) for n in (before[0], point[0], nbytes))
            if last == first:
                return point[1]
            part = math.log(here / first) / math.log(last / first)
            return before[1] * math.pow(point[1] / before[1], part)
        before = point
    return before[1]


def constants(link_class: LinkClass, carrier: Carrier) -> Constants:
    """Return the default constants for a link class and what carries data."""
    return _CONSTANTS[link_class, carrier]


def cheapest(
    candidates: Iterable[One],
    cost: Callable[[One], float],
    floor: Callable[[One], float] | None = None,
) -> tuple[One, float]:
    """Return the cheapest candidate, and its cost; of equals the earlier (simpler) one.

    Args:
        candidates: at least one.
        cost: predicted microseconds; ``inf`` means never.
        floor: what the cost is at least, and quicker to find: what cannot be the
            cheapest is then not costed at all.
    """
    found = list(candidates)
    lowest = [floor(one) if floor else 0.0 for one in found]
    best: tuple[float, int] | None = None
    for bound, index in sorted((low, index) for index, low in enumerate(lowest)):
        if best is None or bound <= best[0]:
            this = cost(found[index]), index
            best = this if best is None else min(best, this)
    assert best is not None
    return found[best[1]], best[0]
