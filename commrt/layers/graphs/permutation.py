# SPDX-License-Identifier: Apache-2.0
"""Random orders of nodes, that spread a graph's edges evenly over blocks.

Nodes that belong together often have numbers that lie together. Then some blocks of the
adjacency matrix have most of its entries. One random order for both rows and columns
leaves the diagonal denser than the rest where nodes have loops. Two different ones do
not (Plexus, SC'25, "double permutation").

A few nodes may have most of the edges. So nodes are dealt out to groups, those with the
most edges first, each to the group with the fewest edges so far; the groups lie one
after the other, and the order within each is drawn. Axes of 2, 3, 4, 6, 8, 12 or 24
ranks cut between groups.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.errors import UsageError, shown
from commrt.layers.graphs.csr import Array, CsrMatrix, as_csr
from commrt.layers.spatial.windows import even_sizes

__all__ = ["DoublePermutation", "double_permutation", "imbalance"]


@dataclass(frozen=True, eq=False)
class DoublePermutation:
    """Two orders of the same nodes; place i of an order has node ``order[i]``."""

    rows: Array
    """Order of the nodes behind even layers."""
    columns: Array
    """Order of the nodes before even layers, and of the features."""

    def __post_init__(self) -> None:
        nodes = np.arange(len(self.columns))
        for name, order in (("rows", self.rows), ("columns", self.columns)):
            if not np.array_equal(np.sort(order), nodes):
                raise UsageError(
                    f"DoublePermutation: {name}={shown(order)} must have each of the "
                    f"numbers 0..{len(nodes) - 1} once"
                )

    def order_before(self, layer_index: int) -> Array:
        """Return the order of the nodes in the input of a layer."""
        return self.rows if layer_index % 2 else self.columns

    def matrix(self, graph: Any, layer_index: int) -> CsrMatrix:
        """Return the matrix that a layer multiplies by."""
        return as_csr(graph).permuted(
            self.order_before(layer_index + 1), self.order_before(layer_index)
        )


def double_permutation(graph: Any, seed: int) -> DoublePermutation:
    """Return two random orders of a graph's nodes; local.

        orders = double_permutation(graph, seed=0)
        sharded = shard_graph(graph, x, y, grid, permutation=orders)

    Args:
        graph: a square matrix, as ``as_csr`` takes it.
        seed: equal on all ranks.
    """
    whole = as_csr(graph, "double_permutation")
    if whole.shape[0] != whole.shape[1] or type(seed) is not int or seed < 0:
        raise UsageError(
            f"double_permutation: a matrix of shape {whole.shape} and seed="
            f"{shown(seed)}: expected a square one, and a number from 0"
        )
    draws = np.random.default_rng(seed)
    columns = np.bincount(whole.indices, minlength=whole.shape[0])
    degree = columns + np.diff(whole.indptr)
    return DoublePermutation(*(_balanced(degree, draws) for _ in range(2)))


_GROUPS = 24


def _balanced(degree: Array, draws: np.random.Generator) -> Array:
    """Return a drawn order whose groups of places have equally many edges."""
    shuffled = draws.permutation(len(degree))
    descending = shuffled[np.argsort(-degree[shuffled], kind="stable")]
    room = even_sizes(len(degree), _GROUPS)
    members: list[list[int]] = [[] for _ in room]
    ties = draws.permutation(_GROUPS).tolist()
    lightest = [(0, ties[at], at) for at, size in enumerate(room) if size]
    heapq.heapify(lightest)
    for node, edges in zip(
        descending.tolist(), degree[descending].tolist(), strict=True
    ):
        load, tie, at = lightest[0]
        members[at].append(node)
        if len(members[at]) < room[at]:
            heapq.heapreplace(lightest, (load + edges, tie, at))
        else:
            heapq.heappop(lightest)
    groups = [draws.permutation(np.array(each, np.int64)) for each in members]
    return np.concatenate(groups)


def imbalance(graph: Any, num_rows: int, num_columns: int) -> float:
    """Return the entries of the fullest block over those of an average one; local.

    Args:
        graph: a matrix, as ``as_csr`` takes it.
        num_rows: blocks above each other, as even as can be.
        num_columns: blocks beside each other.

    The result is 1.0 for a matrix without entries.
    """
    whole = as_csr(graph, "imbalance")
    if not whole.num_entries:
        return 1.0
    ends = [
        np.cumsum(even_sizes(extent, pieces))
        for extent, pieces in zip(whole.shape, (num_rows, num_columns), strict=True)
    ]
    row = np.searchsorted(ends[0], whole.rows(), side="right")
    column = np.searchsorted(ends[1], whole.indices, side="right")
    counts = np.bincount(row * num_columns + column, minlength=num_rows * num_columns)
    return float(counts.max() / counts.mean())
