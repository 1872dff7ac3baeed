# SPDX-License-Identifier: Apache-2.0
"""Blocks and their neighbours in stacks of one shape, for products of stacks.

Numbers of neighbours and of points are rounded up to multiples of eight. The rows that
are too many are independent of all others, with variance 1 and value 0: they add
nothing, neither to a determinant nor to a square. Shapes depend on the block alone, so
a block has the same bits in every stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from commrt.science.rows import Bools, Floats, Ints
from commrt.science.vecchia.covariances import Covariance
from commrt.science.vecchia.hyperparameters import Hyperparameters

__all__ = ["Batch", "Covariances", "batches_of", "covariances_of", "squares_along"]

_MULTIPLE = 8
_MOST_ELEMENTS = 1 << 18
"""Of a stack of covariances: 2 MiB, so that several stay in a cache."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Blocks with one shape: first the neighbours, then the points."""

    places: Ints
    """(blocks,): which blocks these are."""
    x: Floats
    """(blocks, rows, d)."""
    y: Floats
    """(blocks, rows); 0 in rows that are too many."""
    is_real: Bools
    """(blocks, rows): False in rows that are too many."""
    num_neighbors: int
    """Rows of neighbours, those that are too many included."""


def batches_of(
    neighbors: Sequence[Ints], points: Sequence[Ints], x: Floats, y: Floats
) -> Iterator[Batch]:
    """Yield stacks of blocks, given the rows of each in a table.

    Args:
        neighbors, points: for each block, rows of the table; points at least one.
        x, y: the table.
    """
    shapes: dict[tuple[int, int], list[int]] = {}
    for place, (first, last) in enumerate(zip(neighbors, points, strict=True)):
        shape = _rounded(len(first)), _rounded(len(last))
        shapes.setdefault(shape, []).append(place)
    for (num_neighbors, num_points), places in shapes.items():
        rows = num_neighbors + num_points
        step = max(1, _MOST_ELEMENTS // (rows * rows))
        for low in range(0, len(places), step):
            some = places[low : low + step]
            # A row that is too many lies where the block's first point does.
            table = np.repeat([[points[place][0]] for place in some], rows, axis=1)
            is_real = np.zeros(table.shape, np.bool_)
            for one, place in enumerate(some):
                for start, chosen in ((0, neighbors), (num_neighbors, points)):
                    end = start + len(chosen[place])
                    table[one, start:end] = chosen[place]
                    is_real[one, start:end] = True
            values = np.where(is_real, y[table], 0.0)
            yield Batch(np.array(some), x[table], values, is_real, num_neighbors)


def _rounded(number: int) -> int:
    return -(-number // _MULTIPLE) * _MULTIPLE


@dataclass(frozen=True, eq=False)
class Covariances:
    """Covariances of the rows of a stack's blocks."""

    matrix: Floats
    """(blocks, rows, rows): with the nugget."""
    value: Floats
    """f of each pair; 0 with rows that are too many."""
    slope: Floats
    """f' of each pair; 0 with rows that are too many."""


def covariances_of(
    batch: Batch, covariance: Covariance, values: Hyperparameters
) -> Covariances:
    """Return the covariances of a stack."""
    squares = np.zeros((*batch.y.shape, batch.y.shape[1]))
    for dimension in range(batch.x.shape[2]):
        squares += squares_along(batch, dimension, values)
    value, slope = covariance(squares)
    if not batch.is_real.all():
        pairs = batch.is_real[:, :, None] & batch.is_real[:, None, :]
        value, slope = value * pairs, slope * pairs
    matrix = values.variance * value
    rows = np.arange(matrix.shape[1])
    own = values.variance + values.nugget
    matrix[:, rows, rows] = np.where(batch.is_real, own, 1.0)
    return Covariances(matrix, value, slope)


def squares_along(batch: Batch, dimension: int, values: Hyperparameters) -> Floats:
    """Return the squared differences of each pair along a dimension, over its scale.

    Points are subtracted before they are scaled, which would round them: near ones may
    differ by less.
    """
    column = batch.x[:, :, dimension]
    difference = column[:, :, None] - column[:, None, :]
    difference /= values.length_scales[dimension]
    difference *= difference
    return difference
