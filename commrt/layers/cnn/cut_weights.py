# SPDX-License-Identifier: Apache-2.0
"""Weights of which each rank keeps its tile, in a network that is cut over ranks.

    parallelize_cnn(model, grid, strategy, cut_weights=True)
    optimizer = torch.optim.AdamW(model.parameters())  # has states of tiles alone

Axes that cut channels and filters cut the weights of convolutions and linear layers. A
rank keeps the tile that it computes with, its gradient, and the optimizer's numbers of
it: 1 / tiles of each. Nothing is gathered. The tile's gradient is summed over the ranks
that have other samples or space, and those ranks keep the same tile.

The form of a product decides its tile: input channels are cut where inputs stay where
they are, filters where outputs do. It is chosen once, by the bytes that a sample needs,
so that no tile moves in a step. Normalizations keep their few parameters whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from commrt.layers.cnn.known_modules import TRANSPOSED, takes_channels
from commrt.layers.cnn.strategy import ParallelStrategy
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.grid_module import cuts_of, wrong_shape
from commrt.layers.tensor3d.parameter_cut import FeatureCut, ParameterCut
from commrt.layers.tensor3d.roles import Along
from commrt.layers.tensors import DistTensor, Placement, Sharded
from commrt.layers.tensors.channels import form_of
from commrt.layers.tensors.within import Tile

__all__ = ["TileForm", "cut_module", "tile_form"]

Axes = tuple[str, ...]


class TileForm(NamedTuple):
    """How the weight of a product over channels is cut."""

    stationary: str
    """The form in which the product is computed, so that it needs this tile."""
    channels: Axes
    """Axes that cut its input channels."""
    filters: Axes
    """Axes that cut its output channels."""
    result: Axes
    """Axes that cut its bias: those of the result's channels."""


def tile_form(
    module: Any, grid: ProcessGrid, strategy: ParallelStrategy
) -> TileForm | None:
    """Return how a module's weight is cut; None where it stays whole; local."""
    if not takes_channels(module):
        return None
    is_linear = isinstance(module, nn.Linear)
    inputs = module.in_features if is_linear else module.in_channels
    outputs = module.out_features if is_linear else module.out_channels
    groups = getattr(module, "groups", 1)
    channels = _cutting(strategy.channel, grid, inputs)
    filters = _cutting(strategy.filter, grid, outputs)
    if groups > 1:
        axes = channels or filters
        if not axes or grid.size(axes) > groups:
            return None
        return TileForm("auto", axes, axes, axes)
    if not channels and not filters:
        return None
    # Rows of a sample's input and output are as the strides, whatever their extents.
    rows = 1 if is_linear else math.prod(module.stride)
    is_transposed = isinstance(module, TRANSPOSED)
    x = torch.empty(1, inputs, 1 if is_transposed else rows, device="meta")
    placement = Placement(None, Sharded(channels) if channels else None, None)
    part = torch.empty(placement.local_shape(grid, x.shape), device="meta")
    form = form_of(
        DistTensor(part, x.shape, grid, placement),
        outputs * (rows if is_transposed else 1),
        filters,
        strategy.stationary,
    )
    is_split = form.name == "w" and is_linear  # needs two axes, which it may not get
    cuts = (form.channels, form.filters, form.result)
    return TileForm(
        "auto" if is_split else form.name, *(cut.axes if cut else () for cut in cuts)
    )


def _cutting(axes: Axes, grid: ProcessGrid, extent: int) -> Axes:
    """Return the axes of several ranks, where each place gets a channel at least."""
    found = tuple(axis for axis in axes if grid.size(axis) > 1)
    return found if extent >= grid.size(found) else ()


def cut_module(module: Any, grid: ProcessGrid, form: TileForm) -> dict[str, Tile]:
    """Keep this rank's tiles of a module's parameters, in the same parameters; local.

    The module loads whole parameters of the serial model as well as tiles. Returns
    where its tiles lie, by the parameters' names.
    """
    cuts = _cuts(module, grid, form)
    for name, cut in cuts.items():
        parameter = getattr(module, name)
        known: ParameterCut | None = getattr(parameter, "grid_cut", None)
        if known is not None:  # shared with a module that was cut before
            cuts[name] = known
            continue
        parameter.grad = None
        parameter.data = cut.cut(parameter)
        parameter.grid_cut = cut
    module.grid_cuts = cuts
    module.register_load_state_dict_pre_hook(_cut_whole)
    return {name: Tile(cut.shape, _placement(cut)) for name, cut in cuts.items()}


def _cuts(module: Any, grid: ProcessGrid, form: TileForm) -> dict[str, ParameterCut]:
    """Return how the parameters are cut that have dimensions of channels."""
    weight, groups = module.weight, getattr(module, "groups", 1)
    is_transposed = isinstance(module, TRANSPOSED)
    if groups > 1:
        dims = [_cut(grid, form.filters, weight.shape[0], groups)]
    else:
        first, second = form.filters, form.channels
        if is_transposed:
            first, second = second, first
        dims = [
            _cut(grid, axes, extent)
            for axes, extent in zip((first, second), weight.shape, strict=False)
        ]
    cuts = {"weight": ParameterCut(grid, tuple(weight.shape), tuple(dims), None)}
    if module.bias is not None and form.result:
        filters = module.bias.shape[0]
        bias = _cut(grid, form.result, filters, groups if groups > 1 else filters)
        cuts["bias"] = ParameterCut(grid, (filters,), (bias,), None)
    return cuts


def _cut(
    grid: ProcessGrid, axes: Axes, extent: int, units: int | None = None
) -> FeatureCut:
    """Return an even cut of a dimension; ``units``: pieces that stay whole."""
    return FeatureCut(
        Features((extent,), extent // (units or extent)), Along(grid, *axes)
    )


def _cut_whole(
    module: Any,
    state: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Cut whole parameters of a state that torch is about to load."""
    for name, cut in cuts_of(module).items():
        given = state.get(prefix + name)
        if given is None or tuple(given.shape) == cut.shard_shape:
            continue
        if tuple(given.shape) == cut.shape:
            state[prefix + name] = cut.cut(given)
        else:
            message = wrong_shape(prefix + name, tuple(given.shape), cut)
            error_msgs.append(message)
            state[prefix + name] = getattr(module, name)


def _placement(cut: ParameterCut) -> Placement:
    """Return a cut as functions of tensors know it."""
    dims: list[Sharded | None] = [None] * len(cut.shape)
    for number, (features, along) in enumerate(cut.dims):
        if along.axes:
            sizes = [features.count(place, along.size) for place in range(along.size)]
            dims[number] = Sharded(along.axes, sizes=tuple(sizes))
    return Placement(*dims)
