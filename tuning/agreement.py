# SPDX-License-Identifier: Apache-2.0
"""Agreement between two tunings of one machine: the share of equal choices.

Two tunings agree at a size if they choose the same candidate. They also agree if each
one's choice is tied with the best by the other's measurements. Sizes are spaced evenly
in the logarithm over the range that both have measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commrt.tuning.decide import Decision, tied
from commrt.tuning.samples import Group

__all__ = ["Agreement", "agreements", "overall"]

_PER_OCTAVE = 16


@dataclass(frozen=True)
class Agreement:
    """Two tunings of one operation in one group."""

    group: Group
    """Ranks, placement, link class."""
    op: str
    """Operation."""
    same: float
    """Share of the sizes with the same choice."""
    tied: float
    """Share of the sizes with different choices that are tied."""
    sizes: int
    """Sizes compared."""


def agreements(
    first: Sequence[Decision], second: Sequence[Decision]
) -> list[Agreement]:
    """Return the agreement of the operations and groups that both have."""
    others = {(one.group, one.op): one for one in second}
    return [
        _agreement(one, others[one.group, one.op])
        for one in first
        if (one.group, one.op) in others
    ]


def overall(found: Sequence[Agreement]) -> float:
    """Return the share of all sizes with the same or a tied choice."""
    sizes = sum(one.sizes for one in found)
    return sum((one.same + one.tied) * one.sizes for one in found) / max(1, sizes)


def _agreement(first: Decision, second: Decision) -> Agreement:
    ends = [_measured(first), _measured(second)]
    low, high = max(low for low, _ in ends), min(high for _, high in ends)
    steps = max(1, round(math.log2(high / low) * _PER_OCTAVE))
    grid = [low * (high / low) ** (step / steps) for step in range(steps + 1)]
    same = equal = 0
    for nbytes in grid:
        one, other = first.at(round(nbytes)), second.at(round(nbytes))
        if one == other:
            same += 1
        elif one in tied(second.curves, nbytes, second.margin) and other in tied(
            first.curves, nbytes, first.margin
        ):
            equal += 1
    n = len(grid)
    return Agreement(first.group, first.op, same / n, equal / n, n)


def _measured(decision: Decision) -> tuple[int, int]:
    sizes = [size for curve in decision.curves.values() for size in curve.estimates]
    return min(sizes), max(sizes)
