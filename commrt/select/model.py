# SPDX-License-Identifier: Apache-2.0
"""The default without a table: a latency-bandwidth model that is always there.

The model only has to avoid bad choices; ``commrt-tune`` replaces it by measurements.
Its constants are round numbers near what collectives took on two cores of a small
virtual machine (docs/performance.md), not promises about any other machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from commrt.select.facts import LinkClass

__all__ = ["Constants", "Transport", "cheapest", "constants"]

Transport = Literal["shm", "mpi", "gloo"]
One = TypeVar("One")


@dataclass(frozen=True)
class Constants:
    """What work costs."""

    alpha_us: float
    """Per message; on one node multiplied by the ranks that share a core."""
    beta_us: float
    """Per byte that a core copies, or that a port moves between nodes."""
    gamma_us: float
    """Per byte reduced."""


_GAMMA = 1e-5
_CONSTANTS: dict[tuple[LinkClass, Transport], Constants] = {
    ("single", "shm"): Constants(0.25, 2e-5, _GAMMA),
    ("single", "mpi"): Constants(0.7, 6e-5, _GAMMA),
    ("near", "shm"): Constants(0.25, 2e-5, _GAMMA),
    ("near", "mpi"): Constants(0.7, 6e-5, _GAMMA),
    ("far", "shm"): Constants(0.5, 4e-5, _GAMMA),
    ("far", "mpi"): Constants(1.0, 8e-5, _GAMMA),
    # A round costs a hand-over of the core to the next rank.
    ("oversubscribed", "shm"): Constants(2.0, 3e-5, 1.5 * _GAMMA),
    ("oversubscribed", "mpi"): Constants(3.0, 6e-5, 1.5 * _GAMMA),
    # Between nodes messages are MPI's, or gloo's, of which each is staged on both sides
    # before it is reduced: two pretended nodes reduce 64 MiB in two steps in 0.6 of the
    # time of one, and 1 MiB in about the same.
    ("network", "shm"): Constants(2.0, 1.5e-4, 2 * _GAMMA),
    ("network", "mpi"): Constants(2.0, 1.5e-4, 2 * _GAMMA),
    ("network", "gloo"): Constants(100.0, 5e-4, 10 * _GAMMA),
}


def constants(link_class: LinkClass, transport: Transport) -> Constants:
    """Return the default constants for a link class and a transport."""
    return _CONSTANTS[link_class, transport]


def cheapest(
    candidates: Iterable[One],
    cost: Callable[[One], float],
    floor: Callable[[One], float] | None = None,
) -> tuple[One, float]:
    """Return what costs least, and its cost; of equals the earlier (simpler) one.

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
