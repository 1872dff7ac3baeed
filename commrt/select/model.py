# SPDX-License-Identifier: Apache-2.0
"""The default without a table: a latency-bandwidth model that is always there.

The model only has to avoid bad choices; ``commrt-tune`` replaces it by measurements.
Its constants are round numbers near what float32 allreduce took on two cores of a small
virtual machine (docs/performance.md), not promises about any other machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from commrt.select.facts import Candidate, LinkClass, Query

__all__ = ["Constants", "Cost", "Transport", "Work", "cheapest", "constants", "time_us"]

Cost = Callable[[Query, Candidate], float]
"""Predicted microseconds of a candidate for a query; ``inf`` means never."""
Transport = Literal["shm", "mpi"]


@dataclass(frozen=True)
class Work:
    """What lies on a schedule's critical path."""

    rounds: float
    """Messages one after the other."""
    sent_nbytes: float
    """Bytes one after the other through one link."""
    reduced_nbytes: float = 0.0
    """Bytes reduced one after the other."""


@dataclass(frozen=True)
class Constants:
    """What work costs."""

    alpha_us: float
    """Per message."""
    beta_us: float
    """Per byte moved."""
    gamma_us: float
    """Per byte reduced."""


_ON_NODE_GAMMA = 2e-5
_CONSTANTS: dict[tuple[LinkClass, Transport], Constants] = {
    ("single", "shm"): Constants(0.05, 2e-5, _ON_NODE_GAMMA),
    ("single", "mpi"): Constants(0.5, 4e-5, _ON_NODE_GAMMA),
    ("near", "shm"): Constants(0.13, 4e-5, _ON_NODE_GAMMA),
    ("near", "mpi"): Constants(0.7, 1.2e-4, _ON_NODE_GAMMA),
    ("far", "shm"): Constants(0.6, 1.2e-4, _ON_NODE_GAMMA),
    ("far", "mpi"): Constants(1.0, 1.5e-4, _ON_NODE_GAMMA),
    # A round costs a hand-over of the core to the next rank.
    ("oversubscribed", "shm"): Constants(6.0, 1e-4, 2 * _ON_NODE_GAMMA),
    ("oversubscribed", "mpi"): Constants(4.0, 2e-4, 2 * _ON_NODE_GAMMA),
    ("network", "shm"): Constants(0.3, 8e-5, _ON_NODE_GAMMA),
    ("network", "mpi"): Constants(2.0, 1.5e-4, _ON_NODE_GAMMA),
}


def constants(link_class: LinkClass, transport: Transport) -> Constants:
    """Return the default constants for a link class and a transport."""
    return _CONSTANTS[link_class, transport]


def time_us(work: Work, cost: Constants) -> float:
    """Return the modelled microseconds of ``work``."""
    return (
        work.rounds * cost.alpha_us
        + work.sent_nbytes * cost.beta_us
        + work.reduced_nbytes * cost.gamma_us
    )


def cheapest(query: Query, candidates: Sequence[Candidate], cost: Cost) -> Candidate:
    """Return the candidate of lowest cost; of equals the earlier (simpler) one."""
    return min(candidates, key=lambda candidate: cost(query, candidate))
