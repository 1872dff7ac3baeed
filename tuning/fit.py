# SPDX-License-Identifier: Apache-2.0
"""Time as a function of size: a + b·n between measured sizes.

Libraries change protocol and caches overflow at sizes of their own, so no formula holds
over the whole range; from one measured size to the next a startup time and a time per
byte do. Below the first size the time stays what it is there; beyond the last one it
goes on as between the last two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from commrt.tuning.statistics import Estimate

__all__ = ["Curve"]


@dataclass(frozen=True)
class Curve:
    """The time of one candidate."""

    estimates: Mapping[int, Estimate]
    """The measurements, by size: one or more, all sizes above 0."""
    floors: Mapping[int, float] = field(default_factory=dict)
    """Least times in µs, as far as one knows, at sizes between these where others were
    measured and this candidate was not."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Measured sizes, ascending."""
        return tuple(sorted(self.estimates))

    @cached_property
    def _line(self) -> _Line:
        measured = _Line({n: max(seen.us, 1e-6) for n, seen in self.estimates.items()})
        first, last = self.sizes[0], self.sizes[-1]
        between = {
            size: max(least_us, measured.us(size))
            for size, least_us in self.floors.items()
            if first < size < last
        }
        return _Line({**between, **measured.times}) if between else measured

    def us(self, nbytes: float) -> float:
        """Return the time at any size."""
        return self._line.us(nbytes)

    def nearest(self, nbytes: float) -> Estimate:
        """Return the measurement at the nearest size."""
        near = min(self.sizes, key=lambda size: abs(math.log(size / nbytes)))
        return self.estimates[near]


class _Line:
    """Times at some sizes, joined by straight lines."""

    def __init__(self, times: Mapping[int, float]) -> None:
        self.times = times
        self._sizes = sorted(times)

    def us(self, nbytes: float) -> float:
        sizes, times = self._sizes, self.times
        if nbytes <= sizes[0] or len(sizes) == 1:
            return times[sizes[0]]
        after = min(bisect_left(sizes, nbytes), len(sizes) - 1)
        low, high = sizes[after - 1], sizes[after]
        share = (nbytes - low) / (high - low)
        us = times[low] + share * (times[high] - times[low])
        return max(us, times[high]) if nbytes > high else us
