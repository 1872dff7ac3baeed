# SPDX-License-Identifier: Apache-2.0
"""Statistics of repeated launches: the launch, not the repetition, is the sample.

Repetitions within one launch share placement and memory layout, so their median is one
observation; launches are compared by ranks, without assuming a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import median

from commrt.bench.timing_loop import median_interval

__all__ = ["Estimate", "estimate", "geometric_mean", "rank_test", "spread"]

_USUAL_SPREAD = 0.06
"""Standard deviation between launches, of the logarithm of a time, before any says."""
_SPREAD_OF_ONE = 0.25
"""The same where a single launch is all there is. Some launches differ by this much, as
where memory lies otherwise, and no second one says whether this is such a launch."""
_DISTURBED_SPREAD = 0.8
"""What it grows by where all repetitions but those that count were disturbed."""
_USUAL_LAUNCHES = 2
"""Launches that this counts as much as."""
_MIDDLE_HALF = 1.35
"""Width of the middle half of a normal distribution, in standard deviations."""
_OF_MEDIAN = 1.25
"""Standard error of a median over that of a mean."""


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
    within: float = 0.0
    """Standard error of the logarithm of one launch's median, by its repetitions."""
    clean: float = 1.0
    """Share of the repetitions beside which nothing else ran on the ranks' cores."""

    numbers: tuple[int, ...] = ()
    """Numbers of the launches, in the same order; none where nobody numbered them."""
    given_up: bool = False
    """True where fewer than half of a size's launches measured it: the time is one that
    it takes at least."""

    @cached_property
    def doubt(self) -> float:
        """Standard error of the logarithm of the time."""
        logs = [math.log(max(us, 1e-6)) for us in self.launches]
        return _standard_error(logs, self.within, self.clean)

    def doubt_against(self, other: Estimate) -> float:
        """Return the standard error of the logarithm of the ratio of two times.

        Launches that measured both are compared within themselves.
        """
        mine = dict(zip(self.numbers, self.launches, strict=True))
        its = dict(zip(other.numbers, other.launches, strict=True))
        logs = [
            math.log(max(mine[number], 1e-6) / max(its[number], 1e-6))
            for number in mine
            if number in its
        ]
        if not logs:
            return math.hypot(self.doubt, other.doubt)
        within = math.hypot(self.within, other.within)
        return _standard_error(logs, within, min(self.clean, other.clean))


def _standard_error(logs: Sequence[float], within: float, clean: float) -> float:
    """Return the standard error of the middle of these logarithms, of a launch each.

    A few launches say little of how much launches differ, so that counts, too, which is
    usual. Beside it counts how far the repetitions of each one lie apart.
    """
    middle = median(logs)
    usual = _USUAL_SPREAD if len(logs) > 1 else _SPREAD_OF_ONE
    usual += _DISTURBED_SPREAD * (1 - clean)
    squares = _USUAL_LAUNCHES * usual**2 + sum((one - middle) ** 2 for one in logs)
    between = squares / (_USUAL_LAUNCHES + len(logs) - 1) / len(logs)
    return math.sqrt(between + within**2 / len(logs))


def estimate(
    launches: Sequence[Sequence[float]],
    clean: float = 1.0,
    numbers: Sequence[int] = (),
) -> Estimate:
    """Return the estimate from the repetitions of each launch (none of them empty).

    With six launches or more the interval is that of order statistics over launches.
    Below that their whole range is meant, which no fewer samples can improve on; a
    single launch has only the interval of its own repetitions.
    """
    medians = tuple(median(repetitions) for repetitions in launches)
    middle, low, high = median_interval(list(medians))
    if len(launches) == 1:
        middle, low, high = median_interval(list(launches[0]))
    within = math.sqrt(
        sum(spread(repetitions) ** 2 for repetitions in launches) / len(launches)
    )
    n = sum(map(len, launches))
    return Estimate(middle, (low, high), n, medians, within, clean, tuple(numbers))


def spread(repetitions: Sequence[float]) -> float:
    """Return the standard error of the logarithm of the median of these.

    By the middle half of them, so that single outliers do not count.
    """
    ordered = sorted(max(us, 1e-6) for us in repetitions)
    last = len(ordered) - 1
    low, high = ordered[round(last / 4)], ordered[round(3 * last / 4)]
    spread = math.log(high / low) / _MIDDLE_HALF
    return _OF_MEDIAN * spread / math.sqrt(len(ordered))


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
