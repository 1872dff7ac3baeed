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
from dataclasses import dataclass
from functools import cached_property

from commrt.tuning.statistics import Estimate

__all__ = ["Curve"]


@dataclass(frozen=True)
class Curve:
    """The time of one candidate."""

    estimates: Mapping[int, Estimate]
    """The measurements, by size: one or more, all sizes above 0."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Measured sizes, ascending."""
        return tuple(sorted(self.estimates))

    def us(self, nbytes: float) -> float:
        """Return the time at any size."""
        sizes = self.sizes
        if nbytes <= sizes[0] or len(sizes) == 1:
            return self._at(sizes[0])
        after = min(bisect_left(sizes, nbytes), len(sizes) - 1)
        low, high = sizes[after - 1], sizes[after]
        share = (nbytes - low) / (high - low)
        us = self._at(low) + share * (self._at(high) - self._at(low))
        return max(us, self._at(high)) if nbytes > high else us

    def nearest(self, nbytes: float) -> Estimate:
        """Return what was measured at the nearest size."""
        near = min(self.sizes, key=lambda size: abs(math.log(size / nbytes)))
        return self.estimates[near]

    def _at(self, size: int) -> float:
        return max(self.estimates[size].us, 1e-6)
