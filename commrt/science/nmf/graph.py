# SPDX-License-Identifier: Apache-2.0
"""The graph of nearest neighbours of rows that ranks have in pieces.

Rows go round a ring of ranks, so each rank compares its own with those of all others,
and holds two pieces at a time. Then each edge is told to the owner of its other end: a
rank knows all edges of its own rows. Rows of others that these edges name are the halo,
which comes anew whenever rows have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.science.distances import squared_distances
from commrt.science.exact_sums import exact_sum
from commrt.science.nmf.kernels import GraphKernel
from commrt.science.row_route import Coming, RowRoute
from commrt.science.rows import Floats, Ints, RowCut

__all__ = ["Graph", "join_nearest"]

_MOST_ELEMENTS = 1 << 20
"""Distances that are computed at a time."""
_LEAST_SUM = 1e-200
"""Of a kernel's weights; smaller sums are rounded, or 0."""


@dataclass(frozen=True, eq=False)
class Graph:
    """The edges of this rank's rows, and what it needs of other ranks."""

    rows: Ints
    """(edges,): own row of each edge, sorted."""
    columns: Ints
    """(edges,): the other row, in the table of own rows and halo."""
    weights: Floats
    """(kernels, edges)."""
    num_rows: int
    """Own rows."""
    num_halo: int
    """Rows of other ranks that own edges name."""
    num_served: int
    """Rows that go to other ranks: one for each rank that needs it."""
    _route: RowRoute
    _wanted: Ints

    def start_halo(self, own: Floats) -> Coming[Floats]:
        """Start to bring the halo of some rows; collective, an ``alltoallv``.

        Args:
            own: (rows, features), of this rank.
        """
        return self._route.start_back(own[self._wanted])

    def differences(self, table: Floats) -> Floats:
        """Return this rank's part of each kernel's roughness, (kernels,).

        Args:
            table: (own rows and halo, features).

        The sum over ranks is 1/2 sum over pairs (i, j) of K_ij |w_i - w_j|^2, which is
        tr(W^T L W).
        """
        difference = table[self.rows] - table[self.columns]
        squares = (difference * difference).sum(axis=1)
        found: Floats = 0.5 * (self.weights @ squares)
        return found

    def smoothed(self, table: Floats, kernel_weights: Floats) -> tuple[Floats, Floats]:
        """Return A W and the diagonal of D for this rank's rows.

        Args:
            table: (own rows and halo, features).
            kernel_weights: (kernels,): A is the sum of the kernels, each times its own.

        Returns (rows, features) and (rows,).
        """
        weights = kernel_weights @ self.weights
        sums = np.zeros((self.num_rows, table.shape[1]))
        degrees = np.bincount(self.rows, weights, self.num_rows).astype(np.float64)
        if len(self.rows):
            starts = np.flatnonzero(np.diff(self.rows, prepend=-1))
            products = table[self.columns] * weights[:, None]
            sums[self.rows[starts]] = np.add.reduceat(products, starts, axis=0)
        return sums, degrees


def join_nearest(
    x: Floats, cut: RowCut, kernels: Sequence[GraphKernel], comm: Communicator
) -> Graph:
    """Return the graph of all ranks' rows; collective.

    Args:
        x: (rows, features), this rank's.
        cut: the numbers of all ranks' rows.
        kernels: at least one.
        comm: the ranks.

    A graph does not depend on the number of ranks: of equally near rows the one with
    the lower number is the nearer.

    Bytes, for P ranks, n rows of f features, k neighbours of the widest kernel, p
    kernels and h rows of the halo: P - 1 messages, of 8 (f + 1) for each row that the
    rank hands on; two alltoalls of 8 P; alltoallvs of 32 n k and 8 h; allreduces of
    16 p, 48 p, 8 p and 24 p.

    Raises UsageError on all ranks for a kernel whose weights vanish on all edges.
    """
    most = max(kernel.num_neighbors for kernel in kernels)
    ids, squares = _nearest_of_all(x, cut, most, comm)
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    own_ids = np.broadcast_to(cut.ids[:, None], ids.shape)
    edges = np.column_stack(
        [each.reshape(-1) for each in (own_ids, ids, places, squares)]
    ).astype(np.float64)
    ends = np.cumsum(cut.counts)
    owners = np.searchsorted(ends, ids.reshape(-1), side="right")
    came = RowRoute(comm, owners).there(edges)
    both = np.concatenate([edges, came[:, [1, 0, 2, 3]]])
    # An edge that both ends have named stands there twice, and keeps the nearer place.
    both = both[np.lexsort((both[:, 2], both[:, 1], both[:, 0]))]
    is_first = np.ones(len(both), np.bool_)
    is_first[1:] = (both[1:, :2] != both[:-1, :2]).any(axis=1)
    both = both[is_first]
    rows = both[:, 0].astype(np.int64) - (ends[cut.rank] - cut.counts[cut.rank])
    others, place = both[:, 1].astype(np.int64), both[:, 2].astype(np.int64)
    weights = _weights(kernels, both[:, 3], place, cut, comm)
    owners = np.searchsorted(ends, others, side="right")
    is_own = owners == cut.rank
    halo, first = np.unique(others[~is_own], return_index=True)
    route = RowRoute(comm, owners[~is_own][first])
    wanted = route.there(halo).astype(np.int64) - (
        ends[cut.rank] - cut.counts[cut.rank]
    )
    columns = np.empty(len(others), np.int64)
    columns[is_own] = others[is_own] - (ends[cut.rank] - cut.counts[cut.rank])
    columns[~is_own] = cut.counts[cut.rank] + np.searchsorted(halo, others[~is_own])
    return Graph(
        rows=rows,
        columns=columns,
        weights=weights,
        num_rows=len(x),
        num_halo=len(halo),
        num_served=len(wanted),
        _route=route,
        _wanted=wanted,
    )


def _nearest_of_all(
    x: Floats, cut: RowCut, most: int, comm: Communicator
) -> tuple[Ints, Floats]:
    """Return the nearest rows of each own row, (rows, k): numbers and squares."""
    number = min(most, cut.total - 1)
    ids = np.empty((len(x), 0), np.int64)
    squares = np.empty((len(x), 0))
    piece = np.column_stack([cut.ids.astype(np.float64), x])
    right, left = (cut.rank + 1) % comm.size, (cut.rank - 1) % comm.size
    for turn in range(comm.size):
        new_ids, new_squares = _nearest_in(x, cut.ids, piece, number, turn == 0)
        every_id = np.concatenate([ids, new_ids], axis=1)
        every = np.concatenate([squares, new_squares], axis=1)
        order = np.lexsort((every_id, every), axis=1)[:, :number]
        ids = np.take_along_axis(every_id, order, 1)
        squares = np.take_along_axis(every, order, 1)
        if turn == comm.size - 1:
            break
        came = np.empty((cut.counts[(cut.rank - turn - 1) % comm.size], x.shape[1] + 1))
        comm.sendrecv(piece, dest=right, out=came, source=left)
        piece = came
    return ids, squares


def _nearest_in(
    x: Floats, own: Ints, piece: Floats, number: int, is_own: bool
) -> tuple[Ints, Floats]:
    """Return the nearest rows of each own row in a piece of all rows, in order.

    Args:
        x, own: this rank's rows and their numbers.
        piece: (rows, 1 + features): number and features, in the order of numbers.
        number: how many; fewer where the piece has fewer.
        is_own: the piece is this rank's. A row is not its own neighbour.
    """
    others, points = piece[:, 0].astype(np.int64), piece[:, 1:]
    width = max(0, min(number, len(points) - is_own))
    ids = np.empty((len(x), width), np.int64)
    squares = np.empty((len(x), width))
    step = max(1, _MOST_ELEMENTS // max(1, len(points)))
    for low in range(0, len(x), step):
        part = slice(low, low + step)
        distances = squared_distances(x[part], points)
        if is_own:
            distances[own[part, None] == others] = np.inf
        order = np.argsort(distances, axis=1, kind="stable")[:, :width]
        ids[part] = others[order]
        squares[part] = np.take_along_axis(distances, order, 1)
    return ids, squares


def _weights(
    kernels: Sequence[GraphKernel],
    squares: Floats,
    places: Ints,
    cut: RowCut,
    comm: Communicator,
) -> Floats:
    """Return each kernel's weights (kernels, edges), of mean 1 over all rows."""
    joined = np.array([kernel.joins(places) for kernel in kernels], np.float64)
    terms = np.concatenate([joined, joined * squares])
    numbers, totals = np.split(exact_sum(np.ascontiguousarray(terms.T), comm), 2)
    # Each kernel's scale is of its own edges, so no other kernel changes it.
    means = totals / np.maximum(numbers, 1.0)
    weights = np.array(
        [
            kernel.weights(squares, places, float(mean))
            for kernel, mean in zip(kernels, means, strict=True)
        ]
    )
    sums = exact_sum(np.ascontiguousarray(weights.T), comm)
    for kernel, number, weight in zip(kernels, numbers, sums, strict=True):
        if number and weight < _LEAST_SUM:
            raise UsageError(
                f"GraphNMF.fit: {kernel} has no weight on any edge, since all edges "
                f"are too long for its width; pass a larger one: 0.5 halves the root "
                f"mean square length of its edges"
            )
    scale = np.divide(cut.total, sums, out=np.zeros_like(sums), where=sums > 0)
    found: Floats = weights * scale[:, None]
    return found
