# SPDX-License-Identifier: Apache-2.0
"""Time as a function of size: pieces of a + b·n, fitted to measured medians.

Libraries change protocol with size, so one line is not enough; noise makes a line
through every point too much. The number of pieces is what a penalty per piece leaves,
found exactly by dynamic programming (there are a dozen sizes). Errors are relative, as a
microsecond matters at 8 bytes and not at 32 MiB, and count in units of each point's
noise: what was measured well is followed closely.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from commrt.tuning.statistics import Estimate

__all__ = ["Curve", "Piece", "fit_curve", "fit_curves"]

Key = TypeVar("Key")

_PENALTY = 6.0
"""A piece more must lower the sum of squared errors by this much, in units of noise: two
points wrong by nearly twice their noise are enough."""
_LEAST_NOISE = 0.02
"""Relative; what differs by less is of no use to anybody."""
_MOST_NOISE = 0.2


@dataclass(frozen=True)
class Piece:
    """a + b·n from ``lo`` bytes on."""

    lo: float
    """First size of the piece; the previous piece ends there."""
    a_us: float
    """Time of nothing."""
    b_us: float
    """Time per byte."""


@dataclass(frozen=True)
class Curve:
    """The fitted time of one candidate."""

    pieces: tuple[Piece, ...]
    """In order of size."""
    estimates: Mapping[int, Estimate]
    """The measurements, by size."""

    def us(self, nbytes: float) -> float:
        """Return the fitted time."""
        starts = [piece.lo for piece in self.pieces]
        piece = self.pieces[max(0, bisect_right(starts, nbytes) - 1)]
        return piece.a_us + piece.b_us * nbytes

    def spread(self, nbytes: float) -> tuple[float, float]:
        """Return the interval around the fitted time.

        Its relative width is that of the nearest measured size.
        """
        near = min(self.estimates, key=lambda size: abs(math.log(size / nbytes)))
        seen = self.estimates[near]
        us = self.us(nbytes)
        return us * seen.ci[0] / seen.us, us * seen.ci[1] / seen.us


@dataclass(frozen=True)
class _Point:
    """A measured size, and how far off it may be."""

    nbytes: int
    us: float
    noise: float  # relative

    @property
    def weight(self) -> float:
        """Of the absolute error, squared."""
        return 1 / (self.us * self.noise) ** 2


def fit_curves(
    measured: Mapping[Key, Mapping[int, Estimate]],
) -> dict[Key, Curve]:
    """Return each one's curve through its medians: one size or more, above 0 bytes.

    All curves are divided at the same sizes. Where two are equal but for noise, so are
    then their curves: with divisions of their own they would differ between the sizes.
    """
    points = {
        key: [_point(size, seen[size]) for size in sorted(seen)]
        for key, seen in measured.items()
    }
    sizes = sorted({point.nbytes for one in points.values() for point in one})
    ends = _best_ends(sizes, list(points.values()))
    return {
        key: Curve(tuple(_pieces(one, sizes, ends)), dict(measured[key]))
        for key, one in points.items()
    }


def fit_curve(estimates: Mapping[int, Estimate]) -> Curve:
    """Return the curve of a single candidate."""
    return fit_curves({None: estimates})[None]


def _pieces(
    points: Sequence[_Point], sizes: Sequence[int], ends: Sequence[int]
) -> Iterator[Piece]:
    begin = 0
    for end in ends:
        lo = math.sqrt(sizes[begin - 1] * sizes[begin]) if begin else 0.0
        inside = _between(points, sizes[begin], sizes[end - 1])
        if inside:
            yield Piece(lo, *_line(inside))
        begin = end


def _between(points: Sequence[_Point], low: int, high: int) -> list[_Point]:
    return [point for point in points if low <= point.nbytes <= high]


def _point(nbytes: int, seen: Estimate) -> _Point:
    us = max(seen.us, 1e-6)
    # The 95 % interval of the median is about two deviations to each side; so is the
    # range of the few launches for which there is no such interval, or less.
    noise = (seen.ci[1] - seen.ci[0]) / 4 / us
    return _Point(nbytes, us, min(max(noise, _LEAST_NOISE), _MOST_NOISE))


def _best_ends(sizes: Sequence[int], curves: Sequence[Sequence[_Point]]) -> list[int]:
    """Return the end index of each piece, of the cheapest division."""
    n = len(sizes)
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, n + 1):
        options = []
        for begin in range(end):
            # A piece of one size could bend anywhere, so two are the least.
            if end - begin < 2 <= n:
                continue
            before, ends = best[begin]
            error = sum(
                _error(_between(one, sizes[begin], sizes[end - 1])) for one in curves
            )
            options.append((before + error + _PENALTY, [*ends, end]))
        best.append(min(options) if options else (math.inf, []))
    return best[n][1]


def _error(points: Sequence[_Point]) -> float:
    if not points:
        return 0.0
    a, b = _line(points)
    return sum(one.weight * (a + b * one.nbytes - one.us) ** 2 for one in points)


def _line(points: Sequence[_Point]) -> tuple[float, float]:
    """Return a, b >= 0 of least squared error; never both 0."""
    total = sum(one.weight for one in points)
    mean_n = sum(one.weight * one.nbytes for one in points) / total
    mean_us = sum(one.weight * one.us for one in points) / total
    square = sum(one.weight * (one.nbytes - mean_n) ** 2 for one in points)
    product = sum(
        one.weight * (one.nbytes - mean_n) * (one.us - mean_us) for one in points
    )
    b = product / square if square > 0 else 0.0
    if b <= 0:
        return mean_us, 0.0
    a = mean_us - b * mean_n
    if a < 0:
        through = sum(one.weight * one.nbytes**2 for one in points)
        return 0.0, sum(one.weight * one.nbytes * one.us for one in points) / through
    return a, b
