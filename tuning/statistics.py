# SPDX-License-Identifier: Apache-2.0
"""Statistics of repeated launches: the launch, not the repetition, is the sample.

Repetitions within one launch share placement and memory layout, so their median is one
observation; launches are compared by ranks, without assuming a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from commrt.bench.timing_loop import median_interval

__all__ = ["Estimate", "estimate", "geometric_mean", "rank_test"]


@dataclass(frozen=True)
class Estimate:
    """The time of one candidate at one size."""

    us: float
    """Median over launches of the median over repetitions."""
    ci: tuple[float, float]
    """Interval of the median."""
    n: int
    """Repetitions in all launches."""
    launches: tuple[float, ...]
    """Median of each launch."""


def estimate(launches: Sequence[Sequence[float]]) -> Estimate:
    """Return the estimate from the repetitions of each launch (none of them empty).

    With six launches or more the interval is that of order statistics over launches.
    Below that their whole range is meant, which no fewer samples can improve on; a
    single launch has only the interval of its own repetitions.
    """
    medians = tuple(median(repetitions) for repetitions in launches)
    middle, low, high = median_interval(list(medians))
    if len(launches) == 1:
        middle, low, high = median_interval(list(launches[0]))
    return Estimate(middle, (low, high), sum(map(len, launches)), medians)


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact rank-sum test (Mann-Whitney, Wilcoxon).

    Exact by enumeration, ties counted half, for up to 10 launches together; above that
    by the normal approximation, which is within 0.01 of it where 0.05 decides.
    """
    m, n = len(first), len(second)
    if not m or not n:
        return 1.0
    observed = _pairs_won(first, second)
    mean = m * n / 2
    if m + n > 10:
        spread = math.sqrt(m * n * (m + n + 1) / 12)
        return math.erfc(abs(observed - mean) / spread / math.sqrt(2))
    pool = [*first, *second]
    as_far = total = 0
    for chosen in combinations(range(m + n), m):
        inside = set(chosen)
        left = [pool[i] for i in chosen]
        right = [pool[i] for i in range(m + n) if i not in inside]
        as_far += abs(_pairs_won(left, right) - mean) >= abs(observed - mean) - 1e-9
        total += 1
    return as_far / total


def _pairs_won(first: Sequence[float], second: Sequence[float]) -> float:
    return sum((a < b) + (a == b) / 2 for a in first for b in second)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean; 1 of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0
