# SPDX-License-Identifier: Apache-2.0
"""Distances whose bits depend on the two points alone, and the nearest of them.

A product of matrices would be quicker, and would round by the shapes of its blocks. So
ranks with other blocks would find other neighbours.
"""

from __future__ import annotations

import numpy as np

from commrt.science.rows import Floats, Ints

__all__ = ["first_of_each", "nearest", "squared_distances"]


def squared_distances(one: Floats, other: Floats) -> Floats:
    """Return the squared distances (p, q) of points (p, d) and (q, d).

    Features are added in their order, and the distance of a to b is that of b to a.
    """
    total = np.zeros((len(one), len(other)))
    for mine, theirs in zip(one.T, other.T, strict=True):
        difference = mine[:, None] - theirs[None]
        difference *= difference
        total += difference
    return total


def nearest(distances: Floats, ids: Ints, number: int) -> Ints:
    """Return the places of the nearest points, in order; of equal ones the lower id.

    Args:
        distances: (n,), squared or not.
        ids: (n,), the points' numbers.
        number: how many; fewer where there are fewer points.
    """
    places = np.arange(len(distances))
    if 0 < number < len(distances):
        last = np.partition(distances, number - 1)[number - 1]
        places = np.flatnonzero(distances <= last)
    order = np.lexsort((ids[places], distances[places]))[:number]
    return places[order]


def first_of_each(counts: Ints) -> Ints:
    """Return where each group begins, of groups that lie one after the other."""
    return np.cumsum(counts) - counts
