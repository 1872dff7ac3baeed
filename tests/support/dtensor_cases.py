# SPDX-License-Identifier: Apache-2.0
"""Layers on a tensor that is cut in one dimension: by torch's DTensor, by commrt."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from dist_tensor_cases import leaf, off_by
from torch import nn
from torch.nn import functional

from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement

__all__ = ["CASES", "by_commrt", "by_dtensor"]

NEAR = 1e-12
Case = tuple[Callable[[], Any], int]

IMAGE = torch.linspace(-1, 1, 4 * 4 * 12 * 10, dtype=torch.float64)
IMAGE = IMAGE.sin().mul(37).sin().view(4, 4, 12, 10)
DIMS = {"batch": 0, "channels": 1, "height": 2}


def _function(name: str, *args: Any, **more: Any) -> Callable[[], Any]:
    return lambda: lambda x: getattr(functional, name)(x, *args, **more)


LAYERS: dict[str, Callable[[], Any]] = {
    "`Conv2d`, kernel 3": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "`Conv2d`, kernel 3, stride 2": lambda: nn.Conv2d(4, 6, 3, 2, 1),
    "`Conv2d`, kernel 1": lambda: nn.Conv2d(4, 6, 1),
    "`ConvTranspose2d`, kernel 3, stride 2": lambda: nn.ConvTranspose2d(4, 6, 3, 2),
    "`max_pool2d`": _function("max_pool2d", 3, 2, 1),
    "`avg_pool2d`": _function("avg_pool2d", 2),
    "`adaptive_avg_pool2d` to 1": _function("adaptive_avg_pool2d", 1),
    "`interpolate`": _function("interpolate", scale_factor=2, mode="bilinear"),
    "`BatchNorm2d`": lambda: nn.BatchNorm2d(4),
    "`GroupNorm`": lambda: nn.GroupNorm(2, 4),
}
CASES = [(name, where) for name in LAYERS for where in DIMS]


def _both(name: str, change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return a layer, and the same changed."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    if not isinstance(layer, nn.Module):
        return layer, layer
    layer = layer.double()
    return layer, change(copy.deepcopy(layer))


def _expected(layer: Any) -> tuple[Any, Any, Any]:
    """Return one process's result, the gradient that is given, and the input's."""
    one = IMAGE.clone().requires_grad_()
    result = layer(one)
    given = torch.linspace(1, 2, result.numel(), dtype=torch.float64).view_as(result)
    result.backward(given)
    return result.detach(), given, one.grad


def by_dtensor(name: str, where: str, mesh: Any) -> str:
    """Return how DTensor does a case, in the words of the page's table."""
    from torch.distributed.tensor import (
        Replicate,
        Shard,
        distribute_module,
        distribute_tensor,
    )

    layer, mine = _both(name, lambda each: distribute_module(each, mesh))
    expected, given, gradient = _expected(layer)
    x = distribute_tensor(IMAGE, mesh, [Shard(DIMS[where])]).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            y = mine(x)
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            return "error"
        whole = y.full_tensor()
        if whole.shape != expected.shape or off_by(whole, expected) > NEAR:
            return "**wrong**"
        said = "right"
        if y.placements[0].is_replicate():
            said = "right; every rank has the whole result"
        elif y.placements[0].is_partial():
            said = "right; a mean is left open"
        try:
            y.backward(distribute_tensor(given, mesh, [Replicate()]))
        except (RuntimeError, NotImplementedError):
            return f"{said}; backward: error"
        if off_by(x.grad.full_tensor(), gradient) > NEAR:
            return f"{said}; backward: **wrong**"
    return said


def by_commrt(name: str, where: str, grid: ProcessGrid) -> str:
    """Return how commrt does a case, in the words of the page's table."""
    layer, mine = _both(name, lambda each: each)
    expected, given, gradient = _expected(layer)
    dims: list[Any] = [None] * 4
    dims[DIMS[where]] = grid.axes[0]
    x = leaf(IMAGE, grid, Placement(*dims))
    y = mine(x)
    if y.shape != expected.shape or off_by(y.whole(), expected) > NEAR:
        return "**wrong**"
    y.backward(DistTensor.from_whole(given, grid, y.placement))
    assert x.grad is not None
    if off_by(x.grad.whole(), gradient) > NEAR:
        return "right; backward: **wrong**"
    if not y.placement.cut_axes:
        return "right; every rank has the whole result"
    return "right"
