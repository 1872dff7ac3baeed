# SPDX-License-Identifier: Apache-2.0
"""The time that a choice is expected to take: as it was measured, or by the model.

A table's rule has the times of its candidate at some sizes. At another size the nearest
of them holds, times the ratio that the model has between both sizes. Times that were
measured on other ranks say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from commrt.select.facts import Candidate, Query
from commrt.select.match import Hit

__all__ = ["expected_us"]


def expected_us(
    query: Query,
    candidate: Candidate,
    hit: Hit | None,
    predicted_us: Callable[[Query, Candidate], float],
) -> float:
    """Return the microseconds that a candidate is expected to take.

    Args:
        query: the call.
        candidate: what runs it.
        hit: the table's rule for it, if there is one.
        predicted_us: the model; ``inf`` for what it knows nothing of.
    """
    modelled = predicted_us(query, candidate)
    if hit is None or hit.rule.use != candidate or hit.rule.evidence is None:
        return modelled
    if hit.extrapolated is not None and math.isfinite(modelled):
        return modelled
    points = hit.rule.evidence.points
    if not points:
        return modelled
    size = max(1, query.nbytes)
    near = min(points, key=lambda point: abs(math.log(max(1, point.nbytes) / size)))
    there = predicted_us(replace(query, nbytes=near.nbytes), candidate)
    if not (math.isfinite(modelled) and math.isfinite(there) and there > 0):
        return near.us
    return near.us * modelled / there
