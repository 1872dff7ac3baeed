# SPDX-License-Identifier: Apache-2.0
"""Products of features and weights over a grid of ranks, with the roles of a layer.

Weights lie once in the grid. Before a product, ranks along the row axis gather theirs;
in the backward pass they do so again, and the sums of gradients go back to where the
weights lie. Several products can have one sum.

Bytes, for N nodes, K features and M outputs of e bytes on a grid of i inner, f feature
and r row ranks. N/r and so on stand for this rank's piece; an axis of 1 rank sends
nothing.

    forward: allgatherv of K/f * M/i * e over the row axis, for each weight;
        allreduce of N/r * M/i * e over the feature axis
    backward: for each weight allgatherv of K/f * M/i * e, and reduce_scatterv of as
        many, over the row axis; for each operand allreduce of N/r * K/f * e over the
        inner axis

The allgatherv of the backward pass is left out where no operand needs a gradient.
Source: Plexus (SC'25), "3D parallel combination"; AxoNN (SC'24) for the order in which
sums travel beside products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.autocast import low_precision, may_differ
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.graphs.roles import Roles
from commrt.layers.graphs.row_blocks import (
    nested_sizes,
    start_gathered_rows,
    start_scattered_rows,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor

__all__ = ["summed_products"]

Tensor: TypeAlias = torch.Tensor


def summed_products(
    operands: Sequence[DistTensor], weights: Sequence[DistTensor], roles: Roles
) -> DistTensor:
    """Return the sum of ``x @ w`` over pairs; differentiable. Collective.

    Args:
        operands: (N, K), each as ``roles.aggregated``.
        weights: (K, M), each as ``roles.weight``; K may differ from pair to pair.
        roles: of the grid's axes.

    Under torch's autocast products and messages are in its type, and so is the result.
    The result (N, M) lies as ``roles.result``. Raises UsageError for tensors that lie
    elsewhere, before anything is sent.
    """
    grid = operands[0].grid
    for x, weight in zip(operands, weights, strict=True):
        if (
            not x.placement.is_same_as(roles.aggregated, grid, x.shape)
            or not weight.placement.is_same_as(roles.weight, grid, weight.shape)
            or x.shape[1] != weight.shape[0]
            or not (x.dtype == weight.dtype or may_differ(x.local, weight.dtype))
        ):
            raise UsageError(
                f"summed_products: {x} of {x.dtype} by {weight} of {weight.dtype}; "
                f"expected one type, {roles.aggregated} by {roles.weight}, and as many "
                f"rows of the weight as the operand has columns"
            )
    sizes = tuple(_pieces(grid, roles, weight.shape[0]) for weight in weights)
    how = _Axes(grid[roles.inner], grid[roles.features], grid[roles.rows], sizes)
    first = weights[0].local
    dtype = low_precision(first, first.dtype)
    local = _Products.apply(how, *(x.local.to(dtype) for x in (*operands, *weights)))
    shape = operands[0].shape[0], weights[0].shape[1]
    return DistTensor(local, shape, grid, roles.result)


def _pieces(grid: ProcessGrid, roles: Roles, extent: int) -> tuple[int, ...]:
    """Return the rows of a weight that each rank along the row axis keeps."""
    place = grid.place([roles.features])
    return nested_sizes(extent, grid.size(roles.features), place, grid.size(roles.rows))


@dataclass(frozen=True)
class _Axes:
    """The communicators of the roles, and the pieces of each weight."""

    inner: Communicator
    features: Communicator
    rows: Communicator
    sizes: tuple[tuple[int, ...], ...]


class _Products(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, how: _Axes, *tensors: Tensor) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(*tensors)
        count = len(tensors) // 2
        operands, weights = tensors[:count], tensors[count:]
        gathered = _start_gathered(weights, how)
        out: Any = None
        for x, (weight, request) in zip(operands, gathered, strict=True):
            _finish(request)
            product = x.detach() @ weight
            out = product if out is None else out.add_(product)
        _finish(_start_sum(out, how.features))
        return out

    @staticmethod
    @differentiable_once("a graph layer")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        how: _Axes = ctx.how
        saved = ctx.saved_tensors  # checkpoints unpack them once
        count = len(saved) // 2
        operands, weights = saved[:count], saved[count:]
        needed = ctx.needs_input_grad[1:]
        gathered = (
            _start_gathered(weights, how)
            if any(needed[:count])
            else [(None, None)] * count
        )
        requests: list[Any] = []
        for_operands: list[Any] = [None] * count
        for_weights: list[Any] = [None] * count
        for at, (weight, request) in enumerate(gathered):
            _finish(request)
            if needed[at]:
                for_operands[at] = gradient @ weight.t()
                requests.append(_start_sum(for_operands[at], how.inner))
        for at, x in enumerate(operands):
            if needed[count + at]:
                for_weights[at], request = start_scattered_rows(
                    x.t() @ gradient, how.rows, how.sizes[at]
                )
                requests.append(request)
        for request in requests:
            _finish(request)
        return None, *for_operands, *for_weights


def _start_gathered(weights: Sequence[Tensor], how: _Axes) -> list[tuple[Any, Any]]:
    """Start to gather every weight's block."""
    return [
        start_gathered_rows(weight, how.rows, sizes)
        for weight, sizes in zip(weights, how.sizes, strict=True)
    ]


def _start_sum(x: Tensor, comm: Communicator) -> Any:
    """Start to sum a tensor in place over ranks; return the request, or None."""
    if comm.size == 1 or x.numel() == 0:
        return None
    return comm.allreduce(x, nonblocking=True)


def _finish(request: Any) -> None:
    if request is not None:
        request.wait()
