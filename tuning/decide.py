# SPDX-License-Identifier: Apache-2.0
"""From measurements to byte ranges: who wins where.

A candidate is *tied* at a size if its fitted time is within the margin of the best, or
its interval overlaps the best one's and it is within twice the margin. Ranges are the
fewest that use a tied candidate everywhere; of candidates that reach equally far the
simplest is used. A boundary lies where the two fitted curves cross, if they cross where
both are tied. So noise moves a choice only between equals, and seldom.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commrt.tuning.fit import Curve, fit_curve
from commrt.tuning.samples import Group, Recording
from commrt.tuning.statistics import estimate

from commrt.select.facts import Candidate

__all__ = ["Decision", "Range", "curves_of", "decide", "divide", "tied"]

_PER_OCTAVE = 8


@dataclass(frozen=True)
class Range:
    """One candidate for [lo, hi) bytes."""

    lo: int
    """First size."""
    hi: int | None
    """First size beyond; None: no end."""
    candidate: Candidate
    """What to use."""
    crossover: str | None
    """How the lower end was found; None for the first range."""


@dataclass(frozen=True)
class Decision:
    """The ranges of one operation in one group of launches, with what they rest on."""

    op: str
    """Operation."""
    group: Group
    """Ranks, placement, link class."""
    ranges: tuple[Range, ...]
    """Tiling [0, infinity)."""
    curves: Mapping[Candidate, Curve]
    """Fitted times, simplest candidate first."""
    margin: float
    """Relative difference that counts as equal."""

    def at(self, nbytes: int) -> Candidate:
        """Return the choice for a size."""
        for chosen in reversed(self.ranges):
            if nbytes >= chosen.lo:
                return chosen.candidate
        raise AssertionError("ranges begin at 0")


def decide(recording: Recording, margin: float) -> list[Decision]:
    """Return what the launches that shape the table say, for every operation."""
    decisions = []
    for group in recording.groups():
        for op in recording.orders:
            curves = curves_of(recording, group, op)
            if curves:
                ranges = divide(curves, margin)
                decisions.append(Decision(op, group, ranges, curves, margin))
    return decisions


def curves_of(recording: Recording, group: Group, op: str) -> dict[Candidate, Curve]:
    """Return the fitted time of every candidate, simplest first.

    A candidate that failed anywhere at these ranks is left out, whatever its speed. One
    dropped as a clear loser is fitted to the sizes it has; the others are compared with
    it only there.
    """
    failed = {
        failure.candidate
        for failure in recording.failures
        if (failure.ranks, failure.op) == (group.ranks, op)
    }
    seen: dict[Candidate, dict[int, list[tuple[float, ...]]]] = {}
    for sample in recording.of(group, held_out=False):
        if sample.op == op and sample.us:
            sizes = seen.setdefault(sample.candidate, {})
            sizes.setdefault(sample.nbytes, []).append(sample.us)
    return {
        candidate: fit_curve({n: estimate(us) for n, us in seen[candidate].items()})
        for candidate in recording.orders[op]
        if candidate in seen and candidate not in failed
    }


def tied(
    curves: Mapping[Candidate, Curve], nbytes: float, margin: float
) -> set[Candidate]:
    """Return the candidates that are as good as the best at ``nbytes``."""
    present = _comparable(curves, nbytes) or curves
    best = min(present, key=lambda candidate: present[candidate].us(nbytes))
    best_us = present[best].us(nbytes)
    _, best_high = present[best].spread(nbytes)
    found = set()
    for candidate, curve in present.items():
        us = curve.us(nbytes)
        overlaps = curve.spread(nbytes)[0] <= best_high
        if us <= best_us * (1 + margin * (2 if overlaps else 1)):
            found.add(candidate)
    return found


def _comparable(
    curves: Mapping[Candidate, Curve], nbytes: float
) -> dict[Candidate, Curve]:
    """Return the curves that were measured on both sides of ``nbytes``.

    One that failed or was dropped beyond some size must not be extrapolated into the
    sizes where others were measured; beyond the last size of all everybody is.
    """
    sizes = [size for curve in curves.values() for size in curve.estimates]
    inside = min(max(nbytes, min(sizes)), max(sizes))
    return {
        candidate: curve
        for candidate, curve in curves.items()
        if min(curve.estimates) <= inside <= max(curve.estimates)
    }


def divide(curves: Mapping[Candidate, Curve], margin: float) -> tuple[Range, ...]:
    """Return the fewest ranges that use a tied candidate everywhere."""
    grid = _grid(curves)
    sets = [tied(curves, nbytes, margin) for nbytes in grid]
    order = list(curves)
    runs: list[tuple[int, Candidate]] = []
    position = 0
    while position < len(grid):
        reach = {one: _reach(sets, position, one) for one in sets[position]}
        farthest = max(reach.values())
        winner = next(one for one in order if reach.get(one) == farthest)
        runs.append((position, winner))
        position = farthest
    ranges: list[Range] = []
    starts: list[tuple[int, str | None]] = [(0, None)]
    for (begin, earlier), (at, later) in itertools.pairwise(runs):
        # The later one may be tied already before the earlier one stops being so.
        first = at
        while first - 1 > begin and later in sets[first - 1]:
            first -= 1
        low = grid[first - 1]  # where the later one is not yet tied
        cut, why = _boundary(curves, earlier, later, low, grid[at])
        cut = max(cut, starts[-1][0] + 1)  # rounding at the smallest sizes
        starts.append((cut, f"{why} at {cut} B"))
    for index, (_, candidate) in enumerate(runs):
        lo, how = starts[index]
        hi = starts[index + 1][0] if index + 1 < len(runs) else None
        ranges.append(Range(lo, hi, candidate, how))
    return tuple(ranges)


def _reach(sets: Sequence[set[Candidate]], begin: int, candidate: Candidate) -> int:
    end = begin
    while end < len(sets) and candidate in sets[end]:
        end += 1
    return end


def _grid(curves: Mapping[Candidate, Curve]) -> list[float]:
    """Return sizes, evenly spaced in the logarithm, over what was measured."""
    sizes = {size for curve in curves.values() for size in curve.estimates}
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    steps = max(1, round((high - low) * _PER_OCTAVE))
    inner = {2 ** (low + (high - low) * step / steps) for step in range(steps + 1)}
    return sorted(inner)


def _boundary(
    curves: Mapping[Candidate, Curve],
    earlier: Candidate,
    later: Candidate,
    low: float,
    high: float,
) -> tuple[int, str]:
    """Return where ``later`` takes over, the crossing in [low, high] or an end; why."""
    first, second = curves[earlier], curves[later]

    def lead(nbytes: float) -> float:
        return first.us(nbytes) - second.us(nbytes)

    if lead(low) >= 0:
        at, how = low, "the later one leads from the first tied size on,"
    elif lead(high) <= 0:
        at, how = high, "the earlier one leads up to the last tied size,"
    else:
        left, right = low, high
        for _ in range(60):
            middle = math.sqrt(left * right)
            left, right = (middle, right) if lead(middle) < 0 else (left, middle)
        at, how = right, f"fitted a+b*n of {earlier} and {later} cross"
    return round(at), how
