# SPDX-License-Identifier: Apache-2.0
"""One convolution along one cut dimension, also while its halo travels.

Inside of one node a halo is there sooner than anything else: all outputs are computed
at once, from a copy of the piece with its halo. That copy is made again for the
backward pass, since it would be kept beside the piece, which other layers keep, too.

Otherwise the interior is computed apart, while the halo travels. Outputs that read this
rank's piece alone are the *interior*; the others are *borders*. Mostly the interior
needs no copy of the input: with the right symmetric padding, one convolution of the
piece gives all rows of the output, of which the borders are wrong. They are computed
again from small windows once the halo is there, and overwritten.

A convolution is linear in its input. So the backward pass takes gradients of the piece
and of the halo apart: those of the halo first, which travel to their owners while those
of the weights and then of the piece are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from commrt.comm import Communicator
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.exchange import start_messages, start_strips
from commrt.layers.spatial.plain_gradients import added, plain_gradients
from commrt.layers.spatial.weight_gradients import GradientSum
from commrt.layers.spatial.windows import (
    Message,
    Range,
    Sliding,
    Transfers,
    clipped,
    meet,
    transfers,
)

__all__ = ["Geometry", "OverlappedConvolution"]


@dataclass(frozen=True)
class Geometry:
    """A convolution, and how one dimension of it is cut.

    Args:
        dim: the dimension of the tensor that is cut.
        cut: how the input is cut there.
        sliding: the kernel in this dimension.
        outputs: each rank's outputs in this dimension.
        shape: of this rank's piece of the output.
        stride, padding, dilation: for each spatial dimension. The padding is
            symmetric, and 0 in the cut dimension.
        groups: as in torch.
        sum_over: ranks over which gradients of weights are summed, or None.
        is_apart: outputs that need no halo are computed while it travels.
    """

    dim: int
    cut: Cut
    sliding: Sliding
    outputs: tuple[Range, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sum_over: Communicator | None
    is_apart: bool

    @property
    def own(self) -> Range:
        """The elements that this rank has."""
        return self.cut.own

    @cached_property
    def out(self) -> Range:
        """The outputs that this rank computes; none where its piece has no elements."""
        low, high = self.outputs[self.cut.comm.rank]
        return (low, low) if 0 in self.shape else (low, high)

    @cached_property
    def transfers(self) -> Transfers:
        """The halo's messages."""
        windows = [
            clipped(*self.sliding.reads(*out), self.cut.extent) for out in self.outputs
        ]
        return transfers(self.cut.pieces, self.cut.comm.rank, windows)

    @cached_property
    def halo(self) -> list[Range]:
        """The elements of each message that comes."""
        first = self.sliding.reads(*self.outputs[self.cut.comm.rank])[0]
        return [(first + low, first + high) for _, low, high in self.transfers.recvs]

    @cached_property
    def interior(self) -> Range:
        """The outputs that are computed before the halo is there."""
        if not self.is_apart and self.halo:
            return self.out[0], self.out[0]
        return self.sliding.within(self.own, self.cut.extent, self.out)

    @cached_property
    def borders(self) -> list[Range]:
        """The outputs that need halo, in one range or in two."""
        (low, high), (first, last) = self.out, self.interior
        if first == last:
            return [self.out] if low < high else []
        return [each for each in ((low, first), (last, high)) if each[0] < each[1]]

    @cached_property
    def bulk_padding(self) -> int | None:
        """The padding with which the piece alone gives outputs of this rank's shape.

        None where there is none, or where most of them would be computed twice.
        """
        (low, high), (first, last) = self.out, self.interior
        padding = self.own[0] - self.sliding.reads(low, high)[0]
        size = self.own[1] - self.own[0]
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
        padding[self.dim - 2] = along
        return padding


class _Overlap(NamedTuple):
    """Where an input meets a source: its number, places in both, and the length."""

    source: int
    at: int
    start: int
    length: int


class _Inner(NamedTuple):
    """The input from which the interior is computed, the padding, and its outputs."""

    x: Any
    padding: int
    out: Range


class OverlappedConvolution(torch.autograd.Function):  # type: ignore[misc]
    """``apply(x, weight, bias, geometry)`` returns this rank's piece of the output."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, geometry: Geometry) -> Any:
        g, moved = geometry, geometry.transfers
        coming = start_strips(x, g.dim, g.cut.comm, moved.sends, moved.recvs)
        inner = _inner(x, g)
        interior = None
        if inner is not None:
            interior = _convolved(inner.x, weight, bias, g, inner.padding)
        halo = coming.wait()
        borders = [
            _convolved(_input_of(out, x, halo, g), weight, bias, g) for out in g.borders
        ]
        ctx.geometry = g
        ctx.save_for_backward(x, weight, *halo)
        return _put_together(x, interior, borders, g)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        g, moved = ctx.geometry, ctx.geometry.transfers
        x, weight, *halo = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        # Where the bulk takes all gradients of the piece, borders have the halo's left.
        of_bulk = g.bulk_padding is not None
        of_x: Any = None
        of_halo = [torch.zeros_like(strip) for strip in halo]
        of_weight: Any = None
        for out in g.borders:
            wide = _input_of(out, x, halo, g, halo_only=of_bulk)
            part = _rows(gradient, out, g)
            of_wide, more = _gradients(part, wide, weight, g, 0, for_x, for_weight)
            of_weight = added(of_weight, more)
            if for_x:
                if not of_bulk:
                    of_x = _given_back(of_wide, out, of_x, x, g)
                _give_to_halo(of_wide, out, of_halo, g)
        returning = None
        if for_x:
            comm, sends, recvs = g.cut.comm, moved.recvs, moved.sends
            coming = [x.new_empty(_strip_shape(x, each, g)) for each in recvs]
            returning = start_messages(comm, of_halo, sends, coming, recvs)
        inner = _inner(x, g)
        if inner is not None:
            part = _rows(gradient, inner.out, g)
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
                of_inner = _given_back(of_inner, inner.out, of_x, x, g)
            of_x = of_inner
        if for_x and of_x is None:
            of_x = torch.zeros_like(x)
        if returning is not None:
            returned = returning.wait()
            for (_, low, high), strip in zip(moved.sends, returned, strict=True):
                of_x.narrow(g.dim, low, high - low).add_(strip)
        return of_x, *weights.wait(), None


# -- parts of the input and of the output ----------------------------------------------


def _inner(x: Any, g: Geometry) -> _Inner | None:
    """Return the input of the outputs that need no halo; None without any."""
    if g.bulk_padding is not None:
        return _Inner(x, g.bulk_padding, g.out)
    if g.interior[0] == g.interior[1]:
        return None
    return _Inner(_input_of(g.interior, x, [], g), 0, g.interior)


def _overlaps(out: Range, g: Geometry, sources: list[Range]) -> Iterator[_Overlap]:
    """Yield where the input of some outputs meets each source, with its number."""
    reads = g.sliding.reads(*out)
    for number, source in enumerate(sources):
        low, high = meet(reads, source)
        if low < high:
            yield _Overlap(number, low - reads[0], low - source[0], high - low)


def _input_of(
    out: Range, x: Any, halo: list[Any], g: Geometry, *, halo_only: bool = False
) -> Any:
    """Return what some outputs read, padding included, in one tensor.

    With ``halo_only`` zeros stand for the elements of the piece.
    """
    low, high = g.sliding.reads(*out)
    if g.own[0] <= low and high <= g.own[1] and not halo_only:
        return x.narrow(g.dim, low - g.own[0], high - low)
    shape = [*x.shape]
    shape[g.dim] = high - low
    wide = x.new_zeros(shape)
    if not halo_only:
        for _, at, start, length in _overlaps(out, g, [g.own]):
            wide.narrow(g.dim, at, length).copy_(x.narrow(g.dim, start, length))
    if halo:
        for number, at, start, length in _overlaps(out, g, g.halo):
            strip = halo[number].narrow(g.dim, start, length)
            wide.narrow(g.dim, at, length).copy_(strip)
    return wide


def _given_back(of_wide: Any, out: Range, of_x: Any | None, x: Any, g: Geometry) -> Any:
    """Return ``of_x``, None as yet for 0, and the gradient of what some outputs read.

    It may be ``of_x`` itself, changed.
    """
    low, high = g.sliding.reads(*out)
    if of_x is None and low <= g.own[0] and g.own[1] <= high:
        return of_wide.narrow(g.dim, g.own[0] - low, g.own[1] - g.own[0]).clone()
    total = torch.zeros_like(x) if of_x is None else of_x
    for _, at, start, length in _overlaps(out, g, [g.own]):
        total.narrow(g.dim, start, length).add_(of_wide.narrow(g.dim, at, length))
    return total


def _give_to_halo(of_wide: Any, out: Range, of_halo: list[Any], g: Geometry) -> None:
    """Add the gradient of what some outputs read to that of the halo."""
    for number, at, start, length in _overlaps(out, g, g.halo):
        strip = of_halo[number].narrow(g.dim, start, length)
        strip.add_(of_wide.narrow(g.dim, at, length))


def _rows(y: Any, out: Range, g: Geometry) -> Any:
    """Return some outputs of this rank's piece."""
    return y.narrow(g.dim, out[0] - g.out[0], out[1] - out[0])


def _strip_shape(x: Any, message: Message, g: Geometry) -> list[int]:
    shape = [*x.shape]
    shape[g.dim] = message.high - message.low
    return shape


def _put_together(x: Any, interior: Any | None, borders: list[Any], g: Geometry) -> Any:
    """Return this rank's piece of the output."""
    if interior is not None and g.bulk_padding is not None:
        for out, border in zip(g.borders, borders, strict=True):
            _rows(interior, out, g).copy_(border)
        return interior
    if interior is None:
        return borders[0] if borders else x.new_empty(g.shape)
    parts = [*zip(g.borders, borders, strict=True), (g.interior, interior)]
    if len(parts) == 1:
        return interior
    return torch.cat([part for _, part in sorted(parts, key=lambda one: one[0])], g.dim)


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
