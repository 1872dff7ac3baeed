# SPDX-License-Identifier: Apache-2.0
"""A graph's matrix in blocks: each rank has those of its place in the grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.errors import UsageError, shown
from commrt.layers.graphs.csr import CsrMatrix, Range, as_csr
from commrt.layers.graphs.permutation import DoublePermutation
from commrt.layers.graphs.roles import roles_of
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_ranges

__all__ = ["Adjacency", "Block", "adjacency_of", "cut_adjacency", "own_range"]

Read = Callable[[int, Range, Range], CsrMatrix]
"""Returns a block of the matrix of some variant (0: even layers, 1: odd ones)."""


@dataclass(frozen=True)
class Block:
    """This rank's block of the matrix that a layer multiplies by."""

    forward: CsrMatrix
    """Rows along the row axis, columns along the inner one."""
    backward: CsrMatrix
    """Its transpose, for gradients."""


class Adjacency:
    """The matrix of a graph, in blocks for every layer of a network.

    The roles of a grid's axes return after three layers, and the two matrices of a
    double permutation take turns. So a rank keeps 3 blocks and their transposes, with a
    double permutation 6; fewer for networks of fewer layers.

    ``shard_graph``, ``load_graph`` and ``cut_adjacency`` make one.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        num_nodes: int,
        blocks: Mapping[int, Block],
        permutation: DoublePermutation | None = None,
    ) -> None:
        self._grid, self._num_nodes = grid, num_nodes
        self._blocks, self._permutation = dict(blocks), permutation
        self._period = 3 if permutation is None else 6
        self._moves: dict[int, Block] = {}

    @property
    def grid(self) -> ProcessGrid:
        """The ranks."""
        return self._grid

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self._num_nodes

    @property
    def num_entries(self) -> int:
        """Entries of all blocks of this rank, transposes left out."""
        return sum(block.forward.num_entries for block in self._blocks.values())

    def block(self, layer_index: int) -> Block:
        """Return this rank's block in a layer; UsageError where there is none."""
        roles_of(self._grid, layer_index)
        found = self._blocks.get(layer_index % self._period)
        if found is None:
            raise UsageError(
                f"Adjacency: no block for layer {layer_index}; there are some for "
                f"{len(self._blocks)} layers: shard the graph with more layers"
            )
        return found

    def reordering(self, layer_index: int) -> Block | None:
        """Return the matrix that brings nodes from a layer's order to the next one's.

        None where both orders are one: nodes have their places then.
        """
        orders = self._permutation
        if orders is None or np.array_equal(orders.rows, orders.columns):
            return None
        key = layer_index % 6
        if key not in self._moves:
            roles, nodes = roles_of(self._grid, layer_index), self._num_nodes
            rows = own_range(self._grid, (roles.rows,), nodes)
            columns = own_range(self._grid, (roles.inner,), nodes)
            place = np.argsort(orders.order_before(layer_index))
            at = place[orders.order_before(layer_index + 1)[slice(*rows)]]
            here = np.flatnonzero((at >= columns[0]) & (at < columns[1]))
            forward = CsrMatrix.from_entries(
                here,
                at[here] - columns[0],
                np.ones(len(here), self.block(layer_index).forward.data.dtype),
                (rows[1] - rows[0], columns[1] - columns[0]),
            )
            self._moves[key] = Block(forward, forward.transposed())
        return self._moves[key]

    def __repr__(self) -> str:
        return (
            f"<Adjacency of {self._num_nodes} nodes on {self._grid}, "
            f"{len(self._blocks)} blocks>"
        )


def cut_adjacency(
    graph: Any,
    grid: ProcessGrid,
    *,
    layers: int = 3,
    permutation: DoublePermutation | None = None,
) -> Adjacency:
    """Return this rank's blocks of a matrix that every rank has whole; local.

    Args:
        graph: a square matrix, as ``as_csr`` takes it.
        grid: three axes.
        layers: of the networks that will use it.
        permutation: the orders of nodes; None: as they are.
    """
    whole = as_csr(graph, "cut_adjacency")
    if whole.shape[0] != whole.shape[1]:
        raise UsageError(
            f"cut_adjacency: a matrix of shape {whole.shape}; expected a square one"
        )
    if permutation is not None and len(permutation.rows) != whole.shape[0]:
        raise UsageError(
            f"cut_adjacency: a permutation of {len(permutation.rows)} nodes for a "
            f"graph of {whole.shape[0]}"
        )
    variants: dict[int, CsrMatrix] = {}

    def read(which: int, rows: Range, columns: Range) -> CsrMatrix:
        if which not in variants:
            variants[which] = (
                whole if permutation is None else permutation.matrix(whole, which)
            )
        return variants[which].block(rows, columns)

    return adjacency_of(grid, whole.shape[0], layers, permutation, read)


def adjacency_of(
    grid: ProcessGrid,
    num_nodes: int,
    layers: int,
    permutation: DoublePermutation | None,
    read: Read,
) -> Adjacency:
    """Return this rank's blocks; ``read`` gives those of each variant."""
    if type(layers) is not int or layers < 1:
        raise UsageError(f"Adjacency: layers={shown(layers)} must be a number from 1")
    blocks = {}
    period = 3 if permutation is None else 6
    for layer in range(min(layers, period)):
        roles = roles_of(grid, layer)
        rows = own_range(grid, (roles.rows,), num_nodes)
        columns = own_range(grid, (roles.inner,), num_nodes)
        forward = read(layer % 2 if permutation else 0, rows, columns)
        blocks[layer] = Block(forward, forward.transposed())
    return Adjacency(grid, num_nodes, blocks, permutation)


def own_range(grid: ProcessGrid, axes: tuple[str, ...], extent: int) -> Range:
    """Return this rank's elements of a dimension that some axes cut evenly."""
    return even_ranges(extent, grid.size(axes))[grid.place(axes)]
