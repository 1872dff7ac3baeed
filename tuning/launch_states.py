# SPDX-License-Identifier: Apache-2.0
"""Launches that met the machine as it usually is.

The class of the links tells near cores from far ones. It does not show that two virtual
cores take turns on one real core, or that other machines use the same memory. Then
everything takes many times as long, and another candidate is the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from commrt.select.facts import Candidate

__all__ = ["OTHER_STATE", "in_usual_state"]

OTHER_STATE = 3.0
"""Time of a launch's best candidate over that of the fastest launch's, from which they
are not compared. Launches of one state differ by less than two."""


def in_usual_state(
    launches: Mapping[int, Mapping[Candidate, Sequence[float]]],
) -> dict[int, Mapping[Candidate, Sequence[float]]]:
    """Return those of a size's launches (µs of each candidate) that can be compared."""
    best = {
        index: min(median(us) for us in row.values()) for index, row in launches.items()
    }
    limit = OTHER_STATE * min(best.values(), default=0.0)
    return {index: row for index, row in launches.items() if best[index] <= limit}
