# SPDX-License-Identifier: Apache-2.0
"""A graph with features and targets, cut over a grid of ranks for a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from commrt.errors import UsageError
from commrt.layers.graphs.adjacency import Adjacency, cut_adjacency
from commrt.layers.graphs.permutation import DoublePermutation
from commrt.layers.graphs.roles import roles_of
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement

__all__ = ["ShardedGraph", "check_nodes", "shard_graph"]

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, eq=False)
class ShardedGraph:
    """This rank's parts of all that a network of graph layers trains on."""

    adjacency: Adjacency
    """The matrix, for every layer."""
    features: DistTensor
    """(N, D), each element once in the grid; the first layer's input."""
    target: DistTensor
    """(N,), int64, cut as the rows of the last layer's result are."""
    layers: int
    """Layers of the network that ``target`` belongs to."""
    permutation: DoublePermutation | None = None
    """The orders of nodes; None: as they were given."""

    def in_order(self, result: DistTensor) -> Tensor:
        """Return the last layer's result, whole and in the order of the given nodes.

        Differentiable. Collective: bytes of ``DistTensor.whole``.
        """
        whole = result.whole()
        if self.permutation is None:
            return whole
        place = np.argsort(self.permutation.order_before(self.layers))
        return whole[torch.from_numpy(place)]


def shard_graph(
    graph: Any,
    x: Tensor,
    y: Tensor,
    grid: ProcessGrid,
    *,
    layers: int = 3,
    permutation: DoublePermutation | None = None,
) -> ShardedGraph:
    """Return this rank's parts of a graph that every rank has whole; local.

        graph = shard_graph(symmetrically_normalized(a), x, y, grid, layers=2)

    Args:
        graph: a square matrix of float32 or float64, as ``as_csr`` takes it; layers
            multiply by it as it is.
        x: (N, D), features of the same type.
        y: (N,), int64 classes; -100 for nodes that do not count.
        grid: three axes; any numbers of ranks, also more than nodes or features.
        layers: of the network.
        permutation: as ``double_permutation`` draws it; None keeps the order.

    Nothing is padded: pieces differ by one node where N is no multiple of the ranks.
    ``load_graph`` does the same for a graph on disk of which each rank reads its part.
    Raises UsageError for parts that do not fit each other.
    """
    roles_of(grid, 0)
    adjacency = cut_adjacency(graph, grid, layers=layers, permutation=permutation)
    nodes = adjacency.num_nodes
    check_nodes("shard_graph", nodes, x, y)
    if permutation is not None:
        x = x[torch.from_numpy(permutation.columns)]
        y = y[torch.from_numpy(permutation.order_before(layers))]
    features = DistTensor.from_whole(x, grid, roles_of(grid, 0).resting)
    # A copy: the whole need not stay in memory for the sake of its parts.
    features = DistTensor(
        features.local.clone(), features.shape, grid, features.placement
    )
    target = DistTensor.from_whole(y, grid, Placement(roles_of(grid, layers).inner))
    target = DistTensor(target.local.clone(), target.shape, grid, target.placement)
    return ShardedGraph(adjacency, features, target, layers, permutation)


def check_nodes(what: str, nodes: int, x: Any, y: Any) -> None:
    """Raise UsageError unless features and targets have a row for each node."""
    if (
        not isinstance(x, torch.Tensor)
        or not isinstance(y, torch.Tensor)
        or x.dim() != 2
        or y.dim() != 1
        or not len(x) == len(y) == nodes
        or y.dtype != torch.int64
    ):
        given = [
            f"{tuple(each.shape)} of {each.dtype}"
            if isinstance(each, torch.Tensor)
            else type(each).__name__
            for each in (x, y)
        ]
        raise UsageError(
            f"{what}: x is {given[0]} and y {given[1]}; expected tensors with a row "
            f"for each of the {nodes} nodes: (nodes, features), and (nodes,) of int64"
        )
