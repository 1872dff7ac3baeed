# SPDX-License-Identifier: Apache-2.0
"""Kernels that weigh the edges of a graph of nearest neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from commrt.errors import UsageError, shown
from commrt.science.rows import Floats, Ints
from commrt.vocabulary.checks import as_integer

__all__ = ["GraphKernel"]


@dataclass(frozen=True)
class GraphKernel:
    """A weight for each pair of near rows, such as exp(-distance^2 / (2 scale^2)).

    Two rows are joined where one is among the other's nearest ``num_neighbors``.
    Weights are divided by their mean over rows, so that a row's weights add up to 1 on
    average, whatever the kernel. Then no kernel wins by being small.
    """

    num_neighbors: int = 5
    """Nearest rows that each row is joined with."""
    width: float | None = None
    """The scale, over the root mean square length of all edges; None: all edges weigh
    the same."""

    def __post_init__(self) -> None:
        number = as_integer(self.num_neighbors)
        if number is None or number < 1:
            raise UsageError(
                f"GraphKernel: num_neighbors={shown(self.num_neighbors)} must be an "
                f"integer from 1 on"
            )
        object.__setattr__(self, "num_neighbors", number)
        if self.width is None:
            return
        try:
            width = float(self.width)
        except (TypeError, ValueError):
            width = math.nan
        if not (math.isfinite(width) and width > 0):
            raise UsageError(
                f"GraphKernel: width={shown(self.width)} must be a positive number, or "
                f"None"
            )
        object.__setattr__(self, "width", width)

    def weights(self, squares: Floats, places: Ints, mean_square: float) -> Floats:
        """Return the weights of edges, not yet divided by their mean.

        Args:
            squares: squared lengths of the edges.
            places: how near the two rows are, from 0 on: the smaller one of each row's
                place among the other's neighbours.
            mean_square: of the lengths of all ranks' edges.
        """
        is_joined = places < self.num_neighbors
        if self.width is None or mean_square == 0:
            return is_joined.astype(np.float64)
        decay = np.exp(-0.5 * squares / (self.width**2 * mean_square))
        weights: Floats = decay * is_joined
        return weights
