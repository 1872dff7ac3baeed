# SPDX-License-Identifier: Apache-2.0
"""Layers of graph networks whose graph, features and weights are cut over a grid.

    grid = ProcessGrid(commrt.init(), {"x": 2, "y": 2, "z": 2})
    graph = shard_graph(symmetrically_normalized(a), x, y, grid, layers=2)
    first, second = GCNConv3d(64, 32, 0, grid), GCNConv3d(32, 10, 1, grid)
    h = first(graph.features, graph.adjacency).relu()
    loss = cross_entropy3d(second(h, graph.adjacency), graph.target)
    loss.backward()

Each rank keeps its part of every weight: all ranks together keep each weight once.
Bytes are those of ``spmm`` and of ``summed_products``; a bias adds, backwards, an
allreduce over the row axis of this rank's piece of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.autocast import may_differ
from commrt.layers.graphs.adjacency import Adjacency
from commrt.layers.graphs.aggregation import own_features, spmm
from commrt.layers.graphs.products import summed_products
from commrt.layers.graphs.roles import roles_of
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement

__all__ = ["GCNConv3d", "SAGEConv3d"]

Tensor: TypeAlias = torch.Tensor


class _Conv3d(nn.Module):  # type: ignore[misc]
    """A layer with weights of one shape, and a bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layer_index: int,
        grid: ProcessGrid,
        *,
        bias: bool = True,
        chunks: int | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        what = type(self).__name__
        for name, number in (
            ("in_features", in_features),
            ("out_features", out_features),
        ):
            if type(number) is not int or number < 1:
                raise UsageError(
                    f"{what}: {name}={shown(number)} must be a number from 1"
                )
        self.in_features, self.out_features = in_features, out_features
        self.layer_index, self.grid, self.chunks = layer_index, grid, chunks
        self.roles = roles_of(grid, layer_index)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtype = dtype or torch.get_default_dtype()
        for name in self._weight_names:
            self._add_weight(name, generator)
        if bias:
            shape = (out_features,)
            zeros = torch.zeros(shape, dtype=self._dtype)
            self._add("bias", zeros, shape, self.roles.bias)
        else:
            self.register_parameter("bias", None)

    _weight_names: tuple[str, ...] = ("weight",)

    def _add_weight(self, name: str, generator: torch.Generator | None) -> None:
        """Draw a weight on rank 0, and keep this rank's part of it."""
        shape = self.in_features, self.out_features
        whole = torch.empty(shape, dtype=self._dtype)
        if self.grid.rank == 0:
            nn.init.xavier_uniform_(whole, generator=generator)
        self.grid.comm.bcast(whole, 0)
        self._add(name, whole, shape, self.roles.weight)

    def _add(
        self, name: str, whole: Tensor, shape: tuple[int, ...], placement: Placement
    ) -> None:
        part = DistTensor.from_whole(whole, self.grid, placement).local
        self.register_parameter(name, nn.Parameter(part.clone()))
        self._shapes[name] = shape

    def dist_tensors(self) -> dict[str, DistTensor]:
        """Return the parameters as distributed tensors, with the same memory.

        ``checkpoint.save(shards(layer.dist_tensors()))`` saves them for any grid.
        """
        placements = {"bias": self.roles.bias}
        return {
            name: DistTensor(
                self.get_parameter(name),
                shape,
                self.grid,
                placements.get(name, self.roles.weight),
            )
            for name, shape in self._shapes.items()
        }

    def whole_state(self) -> dict[str, Tensor]:
        """Return the whole parameters, on every rank. Collective."""
        return {
            name: tensor.whole().detach().clone()
            for name, tensor in self.dist_tensors().items()
        }

    def load_whole(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of whole parameters that every rank has; local.

        Raises UsageError for other names or shapes.
        """
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if found != self._shapes:
            raise UsageError(
                f"{type(self).__name__}.load_whole: {found}; expected {self._shapes}"
            )
        with torch.no_grad():
            for name, held in self.dist_tensors().items():
                part = DistTensor.from_whole(state[name], self.grid, held.placement)
                held.local.copy_(part.local)

    def extra_repr(self) -> str:
        """Return what ``repr`` says of the layer."""
        return (
            f"{self.in_features}, {self.out_features}, layer_index={self.layer_index}, "
            f"grid={self.grid}"
        )


class GCNConv3d(_Conv3d):
    """Graph convolution: A x W + b.

    Args:
        in_features: columns of ``x``.
        out_features: columns of the result.
        layer_index: the layer in its network, from 0: it says which axis cuts what.
        grid: three axes; a program with fewer gives axes of 1 rank.
        bias: whether b is added.
        chunks: as for ``spmm``.
        dtype: of the parameters; None: torch's default.
        generator: draws the weight, on rank 0; None: torch's own.

    ``layer(x, adjacency)`` takes x (N, in_features) as ``spmm`` does, and returns
    (N, out_features) as ``roles_of(grid, layer_index + 1).given``, which the next layer
    takes. A is what the program has sharded: mostly ``symmetrically_normalized``.

    The weight (in_features, out_features) is drawn by Glorot's rule, whole on rank 0,
    and sent to all: collective. Source: Kipf and Welling, ICLR 2017; Plexus, SC'25.
    """

    def forward(self, x: DistTensor, adjacency: Adjacency) -> DistTensor:
        """Return A x W + b."""
        _check_width(self, x)
        summed = spmm(adjacency, x, self.layer_index, chunks=self.chunks)
        held = self.dist_tensors()
        result = summed_products([summed], [held["weight"]], self.roles)
        return _with_bias(result, held)


class SAGEConv3d(_Conv3d):
    """GraphSAGE with means over neighbours: A x W + x R + b.

    Arguments, shapes and placements are those of ``GCNConv3d``. A is mostly
    ``row_normalized``. ``weight`` is W, ``root_weight`` is R.

    A node's own features have to come to where its neighbours' sum lies: beside the
    bytes of ``GCNConv3d`` are those of ``own_features``. Both products have one sum.

    Source: Hamilton, Ying and Leskovec, NeurIPS 2017, algorithm 1 with the mean
    aggregator, without its normalization of results.
    """

    _weight_names = ("weight", "root_weight")

    def forward(self, x: DistTensor, adjacency: Adjacency) -> DistTensor:
        """Return A x W + x R + b."""
        _check_width(self, x)
        summed = spmm(adjacency, x, self.layer_index, chunks=self.chunks)
        own = own_features(adjacency, x, self.layer_index)
        held = self.dist_tensors()
        weights = [held["weight"], held["root_weight"]]
        result = summed_products([summed, own], weights, self.roles)
        return _with_bias(result, held)


def _with_bias(result: DistTensor, held: Mapping[str, DistTensor]) -> DistTensor:
    """Return a product and its bias, in the type of the product."""
    bias = held.get("bias")
    if bias is None:
        return result
    summed: DistTensor = result + bias.to(result.dtype)
    return summed


def _check_width(layer: _Conv3d, x: Any) -> None:
    """Raise UsageError unless x has the layer's columns and type, before anything."""
    if isinstance(x, DistTensor) and x.dim() == 2:
        weight = layer.weight
        is_odd = x.dtype != weight.dtype and not may_differ(x.local, weight.dtype)
        if x.shape[1] != layer.in_features or is_odd:
            raise UsageError(
                f"{type(layer).__name__}: x of shape {tuple(x.shape)} and {x.dtype}; "
                f"expected {layer.in_features} columns of {weight.dtype}"
            )
