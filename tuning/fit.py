# SPDX-License-Identifier: Apache-2.0
"""Time as a function of size: pieces of a + b·n, fitted to measured medians.

Libraries change protocol with size, so one line is not enough; noise makes a line
through every point too much. The number of pieces is what a penalty per piece leaves,
found exactly by dynamic programming (there are a dozen sizes). Errors are relative: a
microsecond matters at 8 bytes and not at 32 MiB.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from commrt.tuning.statistics import Estimate

__all__ = ["Curve", "Piece", "fit_curve"]

_PENALTY = 0.02
"""A piece more must lower the sum of squared relative errors by this much: about three
points wrong by 8 %."""


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


def fit_curve(estimates: Mapping[int, Estimate]) -> Curve:
    """Return the curve through the medians; at least one size, all above 0 bytes."""
    sizes = sorted(estimates)
    times = [max(estimates[size].us, 1e-6) for size in sizes]
    ends = _best_ends(sizes, times)
    pieces = []
    begin = 0
    for end in ends:
        a, b = _line(sizes[begin:end], times[begin:end])
        lo = math.sqrt(sizes[begin - 1] * sizes[begin]) if begin else 0.0
        pieces.append(Piece(lo, a, b))
        begin = end
    return Curve(tuple(pieces), dict(estimates))


def _best_ends(sizes: list[int], times: list[float]) -> list[int]:
    """Return the end index of each piece, of the cheapest division."""
    n = len(sizes)
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, n + 1):
        options = []
        for begin in range(end):
            # A piece of one point could bend anywhere, so two are the least.
            if end - begin < 2 <= n:
                continue
            before, ends = best[begin]
            error = _error(sizes[begin:end], times[begin:end])
            options.append((before + error + _PENALTY, [*ends, end]))
        best.append(min(options) if options else (math.inf, []))
    return best[n][1]


def _error(sizes: list[int], times: list[float]) -> float:
    a, b = _line(sizes, times)
    return sum(((a + b * n) / t - 1) ** 2 for n, t in zip(sizes, times, strict=True))


def _line(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Return a, b >= 0 of least squared relative error; never both 0."""
    weights = [1 / (t * t) for t in times]
    total = sum(weights)
    mean_n = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    points = list(zip(weights, sizes, times, strict=True))
    square = sum(w * (n - mean_n) ** 2 for w, n, _ in points)
    product = sum(w * (n - mean_n) * (t - mean_t) for w, n, t in points)
    b = product / square if square > 0 else 0.0
    if b <= 0:
        return mean_t, 0.0
    a = mean_t - b * mean_n
    if a < 0:
        through = sum(w * n * n for w, n, _ in points)
        return 0.0, sum(w * n * t for w, n, t in points) / through
    return a, b
