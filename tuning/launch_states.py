# SPDX-License-Identifier: Apache-2.0
"""Launches that met the machine as it usually is.

The class of the links tells near cores from far ones. It does not show that two virtual
cores take turns on one real core, or that other machines use the same memory. Then
everything takes many times as long, and another candidate is the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from commrt.select.facts import Candidate
from commrt.tuning.statistics import spread

__all__ = ["OTHER_STATE", "in_usual_state", "sizes_in_usual_state"]

Launches = Mapping[int, Mapping[Candidate, Sequence[float]]]
"""By launch the times of each candidate's repetitions, in µs."""

OTHER_STATE = 3.0
"""Time of a launch's best candidate over that of the fastest launch's, from which they
are not compared. Launches of one state differ by less than two."""

UNSTEADY = 0.15
"""Standard error of a median by its repetitions, in parts of it: of the candidates of a
launch the median. On a machine of its own one launch of a hundred reaches it, beside a
program that takes a core all do."""


def in_usual_state(
    launches: Mapping[int, Mapping[Candidate, Sequence[float]]],
) -> dict[int, Mapping[Candidate, Sequence[float]]]:
    """Return those of a size's launches (µs of each candidate) that can be compared."""
    best = {
        index: min(median(us) for us in row.values()) for index, row in launches.items()
    }
    limit = OTHER_STATE * min(best.values(), default=0.0)
    return {index: row for index, row in launches.items() if best[index] <= limit}


def _steady(launches: Launches) -> Launches:
    """Return the launches that something else did not run beside, by their spread."""
    return {
        index: row
        for index, row in launches.items()
        if median(spread(us) for us in row.values()) <= UNSTEADY
    }


def sizes_in_usual_state(sizes: Mapping[int, Launches]) -> dict[int, Launches]:
    """Return what can be compared of each size of one operation.

    No size takes longer than a larger one. Where all launches say so they met another
    state of the machine there, and the size is left out.
    """
    found: dict[int, Launches] = {}
    least_us = math.inf
    for nbytes in sorted(sizes, reverse=True):
        rows = {
            index: row
            for index, row in in_usual_state(_steady(sizes[nbytes])).items()
            if min(median(us) for us in row.values()) <= OTHER_STATE * least_us
        }
        if rows:
            found[nbytes] = rows
            best = (min(median(us) for us in row.values()) for row in rows.values())
            least_us = min(least_us, *best)
    return dict(sorted(found.items()))
