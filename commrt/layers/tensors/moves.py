# SPDX-License-Identifier: Apache-2.0
"""Moves parts of tensors between placements, with gradients.

The gradient of a tensor lies as the tensor does. Along axes that cut nothing, and along
partial ones, every rank has the whole gradient: the sum of parts is what was derived,
and each part counts once in it. So the gradient of any move by sums is a move back, in
which nothing is summed.

Bytes: a rank receives what its target part has and its source part lacks. Sums along
partial axes come first, by ``allreduce``; or by ``reduce_scatterv``, where the target
cuts a dimension's pieces along that axis: (p - 1) / p of the part for p ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commrt.comm import Communicator
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors.placement import Placement, Sharded

__all__ = ["moved", "moved_for_parts", "summed_backward"]

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
        found = _scattered_dim(axis, dims, between)
        if found is not None:
            at, sizes = found
            part = _reduce_scattered(part, grid[axis], at, sizes)
            dims = (*dims[:at], target.dims[at], *dims[at + 1 :])
            over.remove(axis)
    if over:
        part = part.clone(memory_format=torch.contiguous_format)
        grid[tuple(axis for axis in grid.axes if axis in over)].allreduce(part)
    return part, dims


def _scattered_dim(
    axis: str, dims: Sequence[Sharded | None], between: _Between
) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension whose pieces this axis cuts further, and the new pieces.

    The pieces of the target must be those of the source, cut along this axis alone.
    """
    grid, shape = between.grid, between.shape
    for number, (dim, before) in enumerate(zip(between.target.dims, dims, strict=True)):
        if dim is None or axis not in dim.axes:
            continue
        axes = before.axes if before is not None else ()
        if dim.axes != (*axes, axis) or dim.block is not None:
            return None
        p, places = grid.size(axis), grid.size(axes)
        sizes = dim.pieces(shape[number], p * places)
        groups = [sizes[place * p : (place + 1) * p] for place in range(places)]
        if before is not None:
            if before.block is not None:
                return None
            if (*map(sum, groups),) != before.pieces(shape[number], places):
                return None
        return number, groups[grid.place(axes)]
    return None


def _reduce_scattered(
    part: torch.Tensor, comm: Communicator, at: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Return this rank's piece of the sum, cut in one dimension."""
    extent = part.shape[at]
    rows = part.movedim(at, 0).contiguous()
    per_row = rows[0].numel() if extent else 0
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
    @differentiable_once("a DistTensor")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        ctx.comm.allreduce(total)
        return total, None


def moved_for_parts(
    local: torch.Tensor,
    grid: ProcessGrid,
    shape: Shape,
    source: Placement,
    target: Placement,
    axes: Sequence[str],
) -> torch.Tensor:
    """Return this rank's part under ``target``, for ranks that compute parts of sums.

    Along ``axes``, which cut nothing in ``target``, each rank computes a part of what
    is made of the tensor. So the gradient is the sum of theirs, of which each rank gets
    its part under ``source``.

    Bytes in the backward pass: those of a reduce_scatter where ``source`` cuts a
    dimension along an axis, (p - 1) / p of the gradient for p ranks; else those of an
    allreduce.
    """
    used = tuple(a for a in grid.axes if a in axes and grid.size(a) > 1)
    if not used:
        return moved(local, grid, shape, source, target)
    back = _Between(
        *(grid, shape, Placement(*target.dims, partial=used), Placement(*source.dims))
    )
    there = _Between(grid, shape, source, target)
    result: torch.Tensor = _MoveForParts.apply(local, there, back)
    return result


class _MoveForParts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, there: _Between, back: _Between
    ) -> torch.Tensor:
        ctx.back = back
        if there.source.is_same_as(there.target, there.grid, there.shape):
            return local.view_as(local)
        part, dims = _summed(local.detach(), there)
        return _laid_out(part, there, dims)

    @staticmethod
    @differentiable_once("a DistTensor")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        part, dims = _summed(gradient.detach(), ctx.back)
        return _laid_out(part, ctx.back, dims), None, None
