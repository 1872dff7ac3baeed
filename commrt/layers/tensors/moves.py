# SPDX-License-Identifier: Apache-2.0
"""Moves parts of tensors between placements, with gradients.

The gradient of a tensor lies as the tensor does. Along axes that cut nothing, and along
partial ones, every rank has the whole gradient: the sum of parts is what was derived,
and each part counts once in it. So the gradient of any move by sums is a move back, in
which nothing is summed.

Bytes: a rank receives what its target part has and its source part lacks. Sums along
partial axes come first, by ``allreduce``; or by ``reduce_scatterv``, where the target
cuts a whole dimension along that axis: (p - 1) / p of the part for p ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commrt.comm import Communicator
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors.placement import Placement, Sharded

__all__ = ["moved", "summed_backward"]

Shape = tuple[int, ...]


def moved(
    local: torch.Tensor,
    grid: ProcessGrid,
    shape: Shape,
    source: Placement,
    target: Placement,
) -> torch.Tensor:
    """Return this rank's part of a tensor under ``target``; differentiable.

    Collective over the grid, unless each rank has already all that it needs.
    """
    if source.is_same_as(target, grid, shape):
        return local
    result: torch.Tensor = _Move.apply(local, _Between(grid, shape, source, target))
    return result


@dataclass(frozen=True)
class _Between:
    """Two placements of a tensor of one shape."""

    grid: ProcessGrid
    shape: Shape
    source: Placement
    target: Placement


class _Move(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, between: _Between) -> torch.Tensor:
        ctx.between = between
        part, dims = _summed(local.detach(), between)
        out = _laid_out(part, between, dims)
        return _as_parts(out, between)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        there = ctx.between
        back = _Between(
            there.grid,
            there.shape,
            Placement(*there.target.dims),
            Placement(*there.source.dims),
        )
        return _Move.apply(gradient, back), None


# -- sums along partial axes -----------------------------------------------------------


def _summed(
    part: torch.Tensor, between: _Between
) -> tuple[torch.Tensor, tuple[Sharded | None, ...]]:
    """Return the part after the sums that the target does not leave open, and cuts."""
    grid, dims, target = between.grid, between.source.dims, between.target
    over = [axis for axis in between.source.partial if axis not in target.partial]
    for axis in [*over]:
        at = _scattered_dim(axis, dims, target)
        if at is not None:
            part = _reduce_scattered(part, grid[axis], at, target.dims[at])
            dims = (*dims[:at], target.dims[at], *dims[at + 1 :])
            over.remove(axis)
    if over:
        part = part.clone(memory_format=torch.contiguous_format)
        grid[tuple(axis for axis in grid.axes if axis in over)].allreduce(part)
    return part, dims


def _scattered_dim(
    axis: str, dims: Sequence[Sharded | None], target: Placement
) -> int | None:
    """Return the dimension that only this axis cuts in the target, and nothing yet."""
    for number, dim in enumerate(target.dims):
        if dim is not None and dim.axes == (axis,) and dim.block is None:
            return number if dims[number] is None else None
    return None


def _reduce_scattered(
    part: torch.Tensor, comm: Communicator, at: int, dim: Sharded | None
) -> torch.Tensor:
    """Return this rank's piece of the sum, cut in one dimension."""
    assert dim is not None
    extent = part.shape[at]
    rows = part.movedim(at, 0).contiguous()
    per_row = rows[0].numel() if extent else 0
    sizes = dim.pieces(extent, comm.size)
    out = rows.new_empty((sizes[comm.rank], *rows.shape[1:]))
    counts = [size * per_row for size in sizes]
    if sum(counts):
        comm.reduce_scatterv(rows.view(-1), counts=counts, out=out.view(-1))
    return out.movedim(0, at)


# -- elements from rank to rank --------------------------------------------------------


def _laid_out(
    part: torch.Tensor, between: _Between, dims: Sequence[Sharded | None]
) -> torch.Tensor:
    """Return this rank's part once the tensor is cut as in the target."""
    grid, shape = between.grid, between.shape
    source, target = Placement(*dims), Placement(*between.target.dims)
    if source.is_same_as(target, grid, shape):
        return part
    pairs = zip(source.dims, target.dims, strict=True)
    if all(a is None or a == b for a, b in pairs):
        return _sliced(part, between, dims)
    out = part.new_empty(target.local_shape(grid, shape))
    before, after = source.layout(grid, shape), target.layout(grid, shape)
    grid.comm.redistribute(part.contiguous(), before, after, out=out)
    return out


def _sliced(
    part: torch.Tensor, between: _Between, dims: Sequence[Sharded | None]
) -> torch.Tensor:
    """Return the piece of what this rank has already."""
    grid, shape, target = between.grid, between.shape, between.target
    for number, (before, dim) in enumerate(zip(dims, target.dims, strict=True)):
        if before is None and dim is not None:
            runs = target.runs(number, grid, shape[number])
            pieces = [part.narrow(number, low, high - low) for low, high, _ in runs]
            nothing = [part.narrow(number, 0, 0)]
            part = torch.cat(pieces or nothing, number)
    return part


def _as_parts(part: torch.Tensor, between: _Between) -> torch.Tensor:
    """Return what this rank contributes along axes that become partial.

    The first place has all of a sum, the others nothing.
    """
    grid, source, target = between.grid, between.source, between.target
    became = [axis for axis in target.partial if axis not in source.partial]
    if any(grid.coords[axis] != 0 for axis in became):
        return torch.zeros_like(part)
    return part


# -- gradients of what several ranks use -----------------------------------------------


def summed_backward(
    x: torch.Tensor, grid: ProcessGrid, axes: Sequence[str]
) -> torch.Tensor:
    """Return ``x``, whose gradient is summed over the ranks along ``axes``.

    For a tensor that ranks have copies of, each of which counts for a part of the
    result. Bytes in the backward pass: those of an allreduce of the gradient.
    """
    used = tuple(a for a in grid.axes if a in axes and grid.size(a) > 1)
    if not used or not x.requires_grad:
        return x
    result: torch.Tensor = _Summed.apply(x, grid[used])
    return result


class _Summed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        ctx.comm.allreduce(total)
        return total, None
