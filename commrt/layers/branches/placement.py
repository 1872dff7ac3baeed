# SPDX-License-Identifier: Apache-2.0
"""Ranks of each branch, and samples that each rank computes.

All of it follows from numbers that ranks share, so all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commrt.layers.spatial.windows import Range, even_ranges

__all__ = ["Placement", "place", "shares"]


@dataclass(frozen=True)
class Placement:
    """The ranks of each branch, in order.

    Either ranks have one branch each, or branches have one rank each.
    """

    ranks: tuple[tuple[int, ...], ...]

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the branches that a rank has."""
        return tuple(at for at, ranks in enumerate(self.ranks) if rank in ranks)

    def samples(self, num_samples: int, size: int) -> list[Range]:
        """Return the samples that each rank computes, of those of all ranks.

        Args:
            num_samples: of all ranks.
            size: how many ranks there are.
        """
        found = [(0, 0)] * size
        for ranks in self.ranks:
            ranges = even_ranges(num_samples, len(ranks))
            for rank, samples in zip(ranks, ranges, strict=True):
                found[rank] = samples
        return found


def shares(costs: Sequence[float], size: int) -> list[int]:
    """Return how many ranks each branch gets, so that the slowest one is quickest.

    Each gets one, and each further rank goes to the branch with the most cost for each
    of its ranks.

    Args:
        costs: of the branches, above 0.
        size: ranks, as many as branches at least.
    """
    found = [1] * len(costs)
    for _ in range(size - len(costs)):
        each = [cost / ranks for cost, ranks in zip(costs, found, strict=True)]
        found[each.index(max(each))] += 1
    return found


def place(costs: Sequence[float], sizes: Sequence[int] | None, size: int) -> Placement:
    """Return where branches lie.

    Args:
        costs: of the branches.
        sizes: ranks of each; None: by the costs.
        size: ranks of all.
    """
    if sizes is None and len(costs) > size:
        loads = [0.0] * size
        owner = [0] * len(costs)
        for at in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
            owner[at] = loads.index(min(loads))
            loads[owner[at]] += costs[at]
        return Placement(tuple((rank,) for rank in owner))
    each = shares(costs, size) if sizes is None else sizes
    ends = [sum(each[:at]) for at in range(len(each) + 1)]
    return Placement(
        tuple(tuple(range(ends[at], ends[at + 1])) for at in range(len(each)))
    )
