# SPDX-License-Identifier: Apache-2.0
"""Clips gradients by the norm over all shards of a model."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.gradients import cut_parameters, grid_of
from commrt.layers.tensor3d.parameter_cut import ParameterCut, cut_of

__all__ = ["clip_grad_norm_"]

Tensor: TypeAlias = torch.Tensor


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    grid: ProcessGrid | None = None,
) -> Tensor:
    """Scale gradients so that their norm is ``max_norm`` at most; return their norm.

    The norm is that of the serial model's gradients: an element that several ranks have
    counts once. All ranks get the same bits. Call ``sync_gradients`` before.

    Args:
        parameters: a model, or parameters of one; a model is needed beside FSDP2, whose
            parameters do not say how they are cut.
        max_norm: the largest norm, above 0.
        norm_type: 2, or another number, or ``inf`` for the largest element.
        grid: the ranks; None: those of the layers.

    Pattern: one ``allreduce`` of one number in float64, over the grid. On one rank it
    is torch's function, bit for bit. Raises UsageError where no grid is found.
    """
    if not max_norm > 0:
        raise UsageError(f"clip_grad_norm_: max_norm={shown(max_norm)} must be above 0")
    if isinstance(parameters, nn.Module):
        pairs = [(each.parameter, each.cut) for each in cut_parameters(parameters)]
        grids = {id(cut.grid): cut.grid for _, cut in pairs if cut is not None}
        if grid is None and len(grids) == 1:
            (grid,) = grids.values()
        else:
            grid = grid_of("clip_grad_norm_", parameters, grid)
    else:
        given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        pairs = [(each, cut_of(each)) for each in given]
        grids = {id(cut.grid): cut.grid for _, cut in pairs if cut is not None}
        if grid is None and len(grids) == 1:
            (grid,) = grids.values()
        if grid is None:
            raise UsageError(
                "clip_grad_norm_: none of the parameters is a layer's of a grid, or "
                "they are of several ones: pass grid"
            )
    if grid.num_ranks == 1:
        these = [parameter for parameter, _ in pairs]
        return nn.utils.clip_grad_norm_(these, max_norm, norm_type)
    power = float(norm_type)
    total = _total(pairs, power, grid)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter, _ in pairs:
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return total


def _total(
    pairs: list[tuple[Tensor, ParameterCut | None]], power: float, grid: ProcessGrid
) -> Tensor:
    """Return the norm over all ranks, each element counted once."""
    largest = power == inf
    found = torch.zeros((), dtype=torch.float64)
    for parameter, cut in pairs:
        if parameter.grad is None or not _counts(parameter, cut, grid):
            continue
        gradient = parameter.grad.detach()
        if hasattr(gradient, "to_local"):
            gradient = gradient.to_local()
        if gradient.numel() == 0:
            continue
        if largest:
            found = torch.maximum(found, gradient.abs().max().double().cpu())
        else:
            norm = torch.linalg.vector_norm(gradient, power, dtype=torch.float64)
            found += norm.cpu() ** power
    grid.comm.allreduce(found, op="max" if largest else "sum")
    return found if largest else found ** (1.0 / power)


def _counts(parameter: Tensor, cut: ParameterCut | None, grid: ProcessGrid) -> bool:
    """Return whether this rank's elements count: it is the first of those with them."""
    held = {*(() if cut is None else cut.axes)}
    if hasattr(parameter, "to_local"):
        held.add("data")
    return all(place == 0 for axis, place in grid.coords.items() if axis not in held)
