# SPDX-License-Identifier: Apache-2.0
"""Reductions over dimensions: a cut dimension leaves parts of the result on ranks.

``x.sum(0)`` of a tensor that "data" cuts in dimension 0 is partial along "data".
``redistribute()`` makes the sum, or leaves each rank a piece of it. The largest and
smallest are not left open: ranks compare theirs, by an allreduce of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.placement import Placement
from commrt.layers.tensors.rules import takes

__all__ = ["amax", "amin", "item", "mean", "sum"]

Tensor: TypeAlias = torch.Tensor


@takes(torch.sum, Tensor.sum, method="sum")
def sum(
    x: DistTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> DistTensor:
    """Return the sum over dimensions; None: over all."""
    numbers = _numbers("sum", x, dim)
    if dim is None and not keepdim:  # autograd is quicker than for all dimensions
        local = x.local.sum(dtype=dtype)
    elif numbers:
        local = x.local.sum(numbers, keepdim=keepdim, dtype=dtype)
    else:
        local = x.local
    return _reduced(x, numbers, keepdim, local)


@takes(torch.mean, Tensor.mean, method="mean")
def mean(
    x: DistTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> DistTensor:
    """Return the mean over dimensions of the whole tensor; None: over all."""
    numbers = _numbers("mean", x, dim)
    cuts = [cut for number in numbers if (cut := x.placement.dims[number])]
    if numbers and all(x.grid.size(cut.axes) == 1 for cut in cuts):
        if dim is None and not keepdim:
            local = x.local.mean(dtype=dtype)
        else:
            local = x.local.mean(numbers, keepdim=keepdim, dtype=dtype)
        return _reduced(x, numbers, keepdim, local)
    total = sum(x, dim, keepdim, dtype=dtype)
    count = math.prod(x.shape[number] for number in numbers)
    return DistTensor(total.local / count, total.shape, total.grid, total.placement)


@takes(torch.amax, Tensor.amax, method="amax")
def amax(x: DistTensor, dim: Any = (), keepdim: bool = False) -> DistTensor:
    """Return the largest over dimensions; (): over all."""
    return _extreme("max", torch.amax, x, dim, keepdim)


@takes(torch.amin, Tensor.amin, method="amin")
def amin(x: DistTensor, dim: Any = (), keepdim: bool = False) -> DistTensor:
    """Return the smallest over dimensions; (): over all."""
    return _extreme("min", torch.amin, x, dim, keepdim)


@takes(Tensor.item, method="item")
def item(x: DistTensor) -> Any:
    """Return the number of a tensor of one element that every rank has."""
    if x.numel() != 1 or x.placement.partial or not x.local.numel():
        raise UsageError(
            f"item: {x} must have one element, which this rank has, and no open sum: "
            f"reduce it and redistribute() it first"
        )
    return x.local.item()


def _extreme(
    op: str, function: Any, x: DistTensor, dim: Any, keepdim: bool
) -> DistTensor:
    """Return the largest or smallest; ranks compare theirs at once.

    Gradients go to all elements that are the result, in equal shares, as torch's do.
    """
    name = f"a{op}"
    numbers = _numbers(name, x, None if dim == () else dim)
    if x.placement.partial:
        raise UsageError(
            f"{name}: {x} has parts on several ranks: redistribute() it first"
        )
    if any(x.shape[number] == 0 for number in numbers):
        raise UsageError(f"{name}: {x} has no element in a dimension of {numbers}")
    over = [
        a for n in numbers for cut in [x.placement.dims[n]] if cut for a in cut.axes
    ]
    axes = tuple(a for a in x.grid.axes if a in over and x.grid.size(a) > 1)
    if not axes:
        local = function(x.local, numbers, keepdim=keepdim)
    else:
        local = _Extreme.apply(x.local, x.grid[axes], op, function, numbers, keepdim)
    result = _reduced(x, numbers, keepdim, local)
    placement = result.placement.with_partial(())
    return DistTensor(local, result.shape, x.grid, placement)


class _Extreme(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        op: str,
        function: Any,
        numbers: Sequence[int],
        keepdim: bool,
    ) -> Tensor:
        if any(x.shape[number] == 0 for number in numbers):
            # A rank without elements adds what changes nothing.
            shape = [1 if n in numbers else e for n, e in enumerate(x.shape)]
            kept = x.new_full(shape, _least(x.dtype) if op == "max" else _most(x.dtype))
        else:
            kept = function(x.detach(), numbers, keepdim=True).contiguous()
        comm.allreduce(kept, op)
        ctx.save_for_backward(x, kept)
        ctx.comm, ctx.numbers, ctx.keepdim = comm, numbers, keepdim
        return kept.clone() if keepdim else _without(kept, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, kept = ctx.saved_tensors
        is_it = (x == kept).to(gradient.dtype)
        count = is_it.sum(ctx.numbers, keepdim=True).contiguous()
        ctx.comm.allreduce(count)
        shares = gradient.reshape(kept.shape) / count
        return is_it * shares, None, None, None, None, None


def _without(x: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return a tensor without dimensions of extent 1."""
    return x.reshape([e for n, e in enumerate(x.shape) if n not in numbers])


def _least(dtype: torch.dtype) -> Any:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Any:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _numbers(name: str, x: DistTensor, dim: Any) -> tuple[int, ...]:
    """Return the dimensions that are reduced, as numbers from 0."""
    if dim is None:
        return (*range(x.dim()),)
    given: Sequence[int] = [dim] if isinstance(dim, int) else dim
    for number in given:
        if not -x.dim() <= number < x.dim():
            raise UsageError(f"{name}: dim={dim} is no dimension of {x}")
    return tuple(sorted({number % x.dim() for number in given}))


def _reduced(
    x: DistTensor, numbers: Sequence[int], keepdim: bool, local: Tensor
) -> DistTensor:
    """Return the result: partial along the axes that cut what was reduced."""
    shape = [1 if n in numbers else e for n, e in enumerate(x.shape)]
    if not keepdim:
        shape = [e for n, e in enumerate(x.shape) if n not in numbers]
    placement = _placement_of_reduced(x.placement, numbers, keepdim)
    return DistTensor.unchecked(local, torch.Size(shape), x.grid, placement)


@lru_cache(maxsize=4096)
def _placement_of_reduced(
    before: Placement, numbers: tuple[int, ...], keepdim: bool
) -> Placement:
    became: list[str] = []
    dims = []
    for number, cut in enumerate(before.dims):
        if number not in numbers:
            dims.append(cut)
            continue
        if cut is not None:
            became += cut.axes
        if keepdim:
            dims.append(None)
    return Placement(*dims, partial=(*before.partial, *became))
