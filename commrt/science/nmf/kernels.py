# SPDX-License-Identifier: Apache-2.0
"""Kernels that weigh the edges of a graph of nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commrt.errors import UsageError, shown
from commrt.science.numbers import as_finite
from commrt.science.rows import Bools, Floats, Ints
from commrt.vocabulary.checks import as_integer

__all__ = ["GraphKernel"]


@dataclass(frozen=True)
class GraphKernel:
    """A weight for each pair of near rows, such as exp(-distance^2 / (2 scale^2)).

    Two rows are joined where one is among the other's nearest ``num_neighbors``.
    Weights are divided by their mean over rows, so that a row's weights add up to 1 on
    average, whatever the kernel. Then no kernel wins by being small. A narrow one may
    still win by its few shortest edges; one whose weights all vanish is refused.
    """

    num_neighbors: int = 5
    """Nearest rows that each row is joined with."""
    width: float | None = None
    """The scale, over the root mean square length of the kernel's edges; None: all
    edges weigh the same."""

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
        width = as_finite(self.width)
        if width is None or width <= 0:
            raise UsageError(
                f"GraphKernel: width={shown(self.width)} must be a positive number, or "
                f"None"
            )
        object.__setattr__(self, "width", width)

    def joins(self, places: Ints) -> Bools:
        """Return which edges of a graph are edges of this kernel.

        Args:
            places: how near the two rows are, from 0 on: the smaller one of each row's
                place among the other's neighbours.
        """
        return places < self.num_neighbors

    def weights(self, squares: Floats, places: Ints, mean_square: float) -> Floats:
        """Return the weights of edges, not yet divided by their mean.

        Args:
            squares: squared lengths of the edges.
            places: as for ``joins``.
            mean_square: of the lengths of this kernel's edges on all ranks.
        """
        is_joined = self.joins(places)
        if self.width is None or mean_square == 0:
            return is_joined.astype(np.float64)
        with np.errstate(over="ignore"):  # beyond all numbers the weight is 0
            lengths = np.sqrt(squares / mean_square) / self.width
            decay = np.exp(-0.5 * lengths * lengths)
        weights: Floats = decay * is_joined
        return weights
