# SPDX-License-Identifier: Apache-2.0
"""One convolution along one cut dimension, also while its halo travels.

Inside of one node a halo is there sooner than anything else: all outputs are computed
at once, from a copy of the piece with its halo. That copy is made again for the
backward pass, since it would be kept beside the piece, which other layers keep, too.

Otherwise the interior is computed apart, while the halo travels (``OutputSplit`` says
which outputs are interior, and which are borders). Mostly the interior needs no copy of
the input: with the right symmetric padding, one convolution of the piece gives all rows
of the output, of which the borders are wrong. They are computed again from small
windows once the halo is there, and overwritten.

A convolution is linear in its input. So the backward pass takes gradients of the piece
and of the halo apart: those of the halo first, which travel to their owners while those
of the weights and then of the piece are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from commrt.comm import Communicator
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.spatial.exchange import start_messages, start_strips
from commrt.layers.spatial.output_split import OutputSplit
from commrt.layers.spatial.plain_gradients import added, plain_gradients
from commrt.layers.spatial.weight_gradients import GradientSum
from commrt.layers.spatial.windows import Range, Sliding

__all__ = ["Geometry", "OverlappedConvolution"]


@dataclass(frozen=True)
class Geometry:
    """A convolution, and how one dimension of it is cut.

    Args:
        split: the dimension that is cut, and its outputs.
        sliding: the kernel in this dimension.
        shape: of this rank's piece of the output.
        stride, padding, dilation: for each spatial dimension. The padding is
            symmetric, and 0 in the cut dimension.
        groups: as in torch.
        sum_over: ranks over which gradients of weights are summed, or None.
    """

    split: OutputSplit
    sliding: Sliding
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sum_over: Communicator | None

    @cached_property
    def bulk_padding(self) -> int | None:
        """The padding with which the piece alone gives outputs of this rank's shape.

        None where there is none, or where most of them would be computed twice.
        """
        (low, high), (first, last) = self.split.out, self.split.interior
        own = self.split.own
        padding = own[0] - self.sliding.reads(low, high)[0]
        size = own[1] - own[0]
        if size == 0 or first == last or 2 * (last - first) < high - low or padding < 0:
            return None
        same = Sliding(
            self.sliding.kernel,
            self.sliding.stride,
            padding,
            padding,
            self.sliding.dilation,
        )
        return padding if same.outputs(size) == high - low else None

    def padding_with(self, along: int) -> list[int]:
        """Return the padding of all dimensions, with ``along`` in the cut one."""
        padding = [*self.padding]
        padding[self.split.dim - 2] = along
        return padding


class _Inner(NamedTuple):
    """The input from which the interior is computed, the padding, and its outputs."""

    x: Any
    padding: int
    out: Range


class OverlappedConvolution(torch.autograd.Function):  # type: ignore[misc]
    """``apply(x, weight, bias, geometry)`` returns this rank's piece of the output."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, geometry: Geometry) -> Any:
        g, split = geometry, geometry.split
        moved = split.transfers
        coming = start_strips(x, split.dim, split.cut.comm, moved.sends, moved.recvs)
        inner = _inner(x, g)
        interior = None
        if inner is not None:
            interior = _convolved(inner.x, weight, bias, g, inner.padding)
        halo = coming.wait()
        borders = [
            _convolved(split.input_of(out, x, halo), weight, bias, g)
            for out in split.borders
        ]
        ctx.geometry = g
        ctx.save_for_backward(x, weight, *halo)
        return _put_together(x, interior, borders, g)

    @staticmethod
    @differentiable_once("a spatial layer")
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        g: Geometry = ctx.geometry
        split, moved = g.split, g.split.transfers
        x, weight, *halo = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        # Where the bulk takes all gradients of the piece, borders have the halo's left.
        of_bulk = g.bulk_padding is not None
        of_x: Any = None
        of_halo = [torch.zeros_like(strip) for strip in halo]
        of_weight: Any = None
        zeros = partial(torch.zeros_like, x)
        for out in split.borders:
            wide = _input_of(out, x, halo, split, halo_only=of_bulk)
            part = split.rows(gradient, out)
            of_wide, more = _gradients(part, wide, weight, g, 0, for_x, for_weight)
            of_weight = added(of_weight, more)
            if for_x:
                if not of_bulk:
                    of_x = split.given_back(of_wide, out, of_x, zeros)
                split.give_to_halo(of_wide, out, of_halo)
        returning = None
        if for_x:
            comm, sends, recvs = split.cut.comm, moved.recvs, moved.sends
            coming = [split.strip_like(x, each) for each in recvs]
            returning = start_messages(comm, of_halo, sends, coming, recvs)
        inner = _inner(x, g)
        if inner is not None:
            part = split.rows(gradient, inner.out)
            arguments = part, inner.x, weight, g, inner.padding
        if inner is not None and for_weight:
            of_weight = added(of_weight, _gradients(*arguments, False, True)[1])
        weights = GradientSum(
            [
                _or_zeros(of_weight, weight) if for_weight else None,
                gradient.sum((0, *range(2, x.dim()))) if for_bias else None,
            ],
            g.sum_over,
        )
        if inner is not None and for_x:
            of_inner = _gradients(*arguments, True, False)[0]
            if not of_bulk:
                of_inner = split.given_back(of_inner, inner.out, of_x, zeros)
            of_x = of_inner
        if for_x and of_x is None:
            of_x = zeros()
        if returning is not None:
            returned = returning.wait()
            for (_, low, high), strip in zip(moved.sends, returned, strict=True):
                of_x.narrow(split.dim, low, high - low).add_(strip)
        return of_x, *weights.wait(), None


# -- parts of the input and of the output ----------------------------------------------


def _inner(x: Any, g: Geometry) -> _Inner | None:
    """Return the input of the outputs that need no halo; None without any."""
    split = g.split
    if g.bulk_padding is not None:
        return _Inner(x, g.bulk_padding, split.out)
    if split.interior[0] == split.interior[1]:
        return None
    return _Inner(split.input_of(split.interior, x, []), 0, split.interior)


def _input_of(
    out: Range, x: Any, halo: list[Any], split: OutputSplit, *, halo_only: bool
) -> Any:
    """Return what some outputs read; with ``halo_only``, zeros for the piece's part."""
    if not halo_only:
        return split.input_of(out, x, halo)
    wide = split.empty_input_of(out, x)
    split.put_halo(wide, out, halo)
    return wide


def _put_together(x: Any, interior: Any | None, borders: list[Any], g: Geometry) -> Any:
    """Return this rank's piece of the output."""
    split = g.split
    if interior is not None and g.bulk_padding is not None:
        for out, border in zip(split.borders, borders, strict=True):
            split.rows(interior, out).copy_(border)
        return interior
    if interior is None:
        return borders[0] if borders else x.new_empty(g.shape)
    parts = [*zip(split.borders, borders, strict=True), (split.interior, interior)]
    return split.together(parts)


# -- torch's convolution ---------------------------------------------------------------


def _convolved(x: Any, weight: Any, bias: Any, g: Geometry, along: int = 0) -> Any:
    """Return a convolution with the padding ``along`` in the cut dimension."""
    zeros = [0] * len(g.stride)
    return torch.convolution(
        *(x, weight, bias, g.stride, g.padding_with(along), g.dilation),
        *(False, zeros, g.groups),
    )


def _gradients(
    gradient: Any,
    x: Any,
    weight: Any,
    g: Geometry,
    along: int,
    for_x: bool,
    for_weight: bool,
) -> tuple[Any, Any]:
    how = g.stride, g.padding_with(along), g.dilation, g.groups
    return plain_gradients(gradient, x, weight, how, for_x, for_weight)


def _or_zeros(gradient: Any | None, weight: Any) -> Any:
    return torch.zeros_like(weight) if gradient is None else gradient
