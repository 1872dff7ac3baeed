# SPDX-License-Identifier: Apache-2.0
"""Activations between layers: cut and put together along one axis of a grid.

A gradient lies as its tensor does. Along axes that do not cut a tensor, each rank has
the whole gradient. So the gradient of taking a piece is an ``allgather``, and that of
putting pieces together takes a piece.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.roles import Along, check_axes

__all__ = [
    "Gathering",
    "Scattering",
    "cut_features",
    "cut_sequence",
    "whole_features",
    "whole_sequence",
]

Tensor: TypeAlias = torch.Tensor


# -- features --------------------------------------------------------------------------


def cut_features(x: Tensor, dim: int, features: Features, along: Along) -> Tensor:
    """Return this rank's features of a tensor that ranks along an axis have whole.

    Forward: nothing is sent. Backward: an ``allgatherv`` of the gradient along the
    axis. Bytes: those of ``x``.
    """
    if along.comm is None:
        return x
    cut: Tensor = _Cut.apply(x, dim, features, along)
    return cut


def whole_features(x: Tensor, dim: int, features: Features, along: Along) -> Tensor:
    """Return all features of a tensor that is cut along an axis.

    Forward: an ``allgatherv`` along the axis. Bytes: those of the result. Backward:
    nothing is sent.
    """
    if along.comm is None:
        return x
    whole: Tensor = _Whole.apply(x, dim, features, along)
    return whole


class _Cut(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, features: Features, along: Along
    ) -> Tensor:
        ctx.args = dim, features, along
        # No view: autograd does not let a Function return one that changes in place.
        part = features.taken(x, dim, along.place, along.size)
        return part.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Whole.apply(gradient, *ctx.args), None, None, None


class _Whole(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, features: Features, along: Along
    ) -> Tensor:
        ctx.args = dim, features, along
        return _gathered(x, dim, features, along)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Cut.apply(gradient, *ctx.args), None, None, None


def _gathered(x: Tensor, dim: int, features: Features, along: Along) -> Tensor:
    assert along.comm is not None
    shapes = []
    for place in range(along.size):
        shape = [*x.shape]
        shape[dim] = features.count(place, along.size)
        shapes.append(shape)
    counts = [math.prod(shape) for shape in shapes]
    flat = x.detach().contiguous().view(-1)
    out = flat.new_empty(sum(counts))
    if sum(counts):
        along.comm.allgatherv(flat, counts=counts, out=out)
    parts = out.split(counts)
    pieces = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return features.joined(pieces, dim)


# -- sequences -------------------------------------------------------------------------


class Gathering:
    """The pieces of a sequence on their way to all ranks; ``wait()`` returns it whole.

    Args:
        x: this rank's piece; all ranks' are of one shape.
        dim: the dimension of the sequence.
        comm: the ranks.
    """

    def __init__(self, x: Tensor, dim: int, comm: Communicator) -> None:
        self._dim, self._shape = dim % x.dim(), x.shape
        self._out = x.new_empty((comm.size, *x.shape))
        self._request = comm.allgather(
            x.detach().contiguous(), out=self._out, nonblocking=True
        )

    def wait(self) -> Tensor:
        """Return the whole sequence."""
        self._request.wait()
        if self._dim == 0:
            return self._out.flatten(0, 1)
        return torch.cat([*self._out], self._dim)


class Scattering:
    """The sum of sequences on its way; ``wait()`` returns this rank's piece of it.

    Args:
        x: this rank's summand, the whole sequence, whose length the ranks divide.
        dim: the dimension of the sequence.
        comm: the ranks.
    """

    def __init__(self, x: Tensor, dim: int, comm: Communicator) -> None:
        dim %= x.dim()
        shape = [*x.shape]
        shape[dim] //= comm.size
        if dim:
            x = torch.stack(x.split(shape[dim], dim)) if shape[dim] else x
        self._out = x.new_empty(shape)
        self._request = comm.reduce_scatter(
            x.contiguous().view(-1), out=self._out.view(-1), nonblocking=True
        )

    def wait(self) -> Tensor:
        """Return this rank's piece of the sum."""
        self._request.wait()
        return self._out


def cut_sequence(x: Tensor, grid: ProcessGrid, axis: str = "x", dim: int = 1) -> Tensor:
    """Return this rank's piece of a sequence that ranks along an axis have whole.

    Args:
        x: any tensor, equal along the axis.
        grid: the ranks.
        axis: the axis that cuts it.
        dim: the dimension of the sequence; the ranks must divide its length.

    Forward: nothing is sent. Backward: an ``allgatherv``. Bytes: those of ``x``.
    Raises UsageError where the length cannot be divided.
    """
    check_axes("cut_sequence", grid)
    along = Along(grid, axis)
    if x.shape[dim] % along.size:
        raise UsageError(
            f"cut_sequence: a sequence of {x.shape[dim]} elements, in dimension {dim} "
            f"of {tuple(x.shape)}, cannot be cut into {along.size} equal pieces; pad "
            f"it to a multiple"
        )
    return cut_features(x, dim, Features((x.shape[dim],)), along)


def whole_sequence(
    x: Tensor, grid: ProcessGrid, axis: str = "x", dim: int = 1
) -> Tensor:
    """Return the whole of a sequence that ``cut_sequence`` has cut.

    Forward: an ``allgatherv``. Bytes: those of the result. Backward: nothing is sent.
    """
    check_axes("whole_sequence", grid)
    along = Along(grid, axis)
    return whole_features(x, dim, Features((x.shape[dim] * along.size,)), along)
