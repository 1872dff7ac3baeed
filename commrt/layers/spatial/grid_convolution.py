# SPDX-License-Identifier: Apache-2.0
"""One convolution along several cut dimensions, also while its halos travel.

A rank's *window* is what its outputs read: its piece, strips of other ranks, and zeros
as padding. Strips come along one cut dimension after another. Those of a later one are
as wide as the window is by then, so corners need no messages of their own.

Inside of one node all outputs are computed at once, from the window. Otherwise outputs
that read this rank's piece alone, the *interior*, are computed in as many parts as
there are cut dimensions, each while strips of one travel; then the others, from boxes
of the window.

The backward pass takes the gradient of the window first. It goes back along the last
dimension while the gradient of the weights is computed, and along the one before it
while that of the piece is. Autograd keeps the piece, which other layers keep, too, and
the strips: no copy of the piece with its halo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.exchange import Strips, start_messages
from commrt.layers.spatial.plain_gradients import added, plain_gradients
from commrt.layers.spatial.weight_gradients import GradientSum
from commrt.layers.spatial.windows import (
    Range,
    Sliding,
    Transfers,
    clipped,
    even_ranges,
    meet,
    transfers,
)

__all__ = ["CutDimension", "GridConvolution", "GridGeometry"]

Box: TypeAlias = tuple[Range, ...]
"""A range for each cut dimension."""


@dataclass(frozen=True)
class CutDimension:
    """One dimension that is cut, and the kernel in it.

    Args:
        dim: the dimension of the tensor.
        cut: how the input is cut there.
        sliding: the kernel.
        outputs: each rank's outputs.
    """

    dim: int
    cut: Cut
    sliding: Sliding
    outputs: tuple[Range, ...]

    @property
    def out(self) -> Range:
        """The outputs of this rank."""
        return self.outputs[self.cut.comm.rank]

    @cached_property
    def window(self) -> Range:
        """The elements that this rank's outputs read, padding included."""
        return self.sliding.reads(*self.out)

    @cached_property
    def transfers(self) -> Transfers:
        """The messages of the halo."""
        reads = (self.sliding.reads(*out) for out in self.outputs)
        windows = [clipped(*each, self.cut.extent) for each in reads]
        return transfers(self.cut.pieces, self.cut.comm.rank, windows)

    @cached_property
    def interior(self) -> Range:
        """The outputs that read this rank's piece alone, without padding."""
        (low, high), (first, last), one = self.out, self.cut.own, self.sliding
        low = max(low, -(-(first + one.low) // one.stride))
        high = min(high, (last + one.low - one.span) // one.stride + 1)
        return (low, max(low, high))


class _Place(NamedTuple):
    """Where a source lies along a dimension, and where it begins in the source."""

    low: int
    high: int
    start: int


class _Source(NamedTuple):
    """The piece or a strip, and its place along each cut dimension."""

    x: Any
    places: tuple[_Place, ...]


@dataclass(frozen=True)
class GridGeometry:
    """A convolution, and how its dimensions are cut.

    Args:
        dims: the dimensions that are cut, in the order of their exchanges.
        shape: of this rank's piece of the output.
        stride, padding, dilation: for each spatial dimension. The padding is
            symmetric, and 0 in cut dimensions.
        groups: as in torch.
        sum_over: ranks over which gradients of weights are summed, or None.
        is_apart: outputs that need no halo are computed while it travels.
    """

    dims: tuple[CutDimension, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sum_over: Communicator | None
    is_apart: bool

    @cached_property
    def interior(self) -> Box | None:
        """The outputs that are computed before all halos are there; None: none is."""
        box = tuple(each.interior for each in self.dims)
        is_empty = 0 in self.shape or any(low >= high for low, high in box)
        return box if self.is_apart and not is_empty else None

    @cached_property
    def parts(self) -> list[Box]:
        """The interior in one part for each exchange; a part may be missing."""
        if self.interior is None:
            return []
        (low, high), *others = self.interior
        pieces = even_ranges(high - low, len(self.dims))
        return [((low + a, low + b), *others) for a, b in pieces if a < b]

    @cached_property
    def borders(self) -> list[Box]:
        """The other outputs, in boxes that do not overlap."""
        outs = tuple(each.out for each in self.dims)
        if 0 in self.shape:
            return []
        if self.interior is None:
            return [outs]
        found = []
        for number, ((low, high), (first, last)) in enumerate(
            zip(outs, self.interior, strict=True)
        ):
            for side in ((low, first), (last, high)):
                if side[0] < side[1]:
                    found.append((*self.interior[:number], side, *outs[number + 1 :]))
        return found

    def reads(self, box: Box) -> Box:
        """Return what outputs read, counted in the whole tensor."""
        pairs = zip(self.dims, box, strict=True)
        return tuple(each.sliding.reads(*out) for each, out in pairs)

    def of_output(self, y: Any, box: Box) -> Any:
        """Return some outputs of this rank's piece."""
        for each, (low, high) in zip(self.dims, box, strict=True):
            y = y.narrow(each.dim, low - each.out[0], high - low)
        return y

    def of_piece(self, x: Any, box: Box) -> Any:
        """Return elements of this rank's piece of the input."""
        for each, (low, high) in zip(self.dims, box, strict=True):
            x = x.narrow(each.dim, low - each.cut.own[0], high - low)
        return x

    def in_window(self, box: Box) -> Box:
        """Return the same elements, counted in this rank's window."""
        pairs = zip(self.dims, box, strict=True)
        return tuple(
            (low - each.window[0], high - each.window[0]) for each, (low, high) in pairs
        )

    @cached_property
    def whole_window(self) -> Box:
        """All of the window."""
        return tuple((0, each.window[1] - each.window[0]) for each in self.dims)


class GridConvolution(torch.autograd.Function):  # type: ignore[misc]
    """``apply(x, weight, bias, geometry)`` returns this rank's piece of the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, geometry: GridGeometry
    ) -> Any:
        g = geometry
        y = x.new_empty(g.shape) if g.interior is not None or 0 in g.shape else None
        parts = iter(g.parts)
        strips: list[list[Any]] = []
        for level in range(len(g.dims)):
            coming = _started(x, strips, level, g)
            part = next(parts, None)
            if part is not None:
                inner = g.of_piece(x, g.reads(part))
                g.of_output(y, part).copy_(_convolved(inner, weight, bias, g))
            strips.append(coming.wait())
        for out in g.borders:
            wide = _box(x, strips, len(g.dims), g.in_window(g.reads(out)), g)
            border = _convolved(wide, weight, bias, g)
            if y is None:
                y = border
            else:
                g.of_output(y, out).copy_(border)
        ctx.geometry, ctx.counts = g, [len(each) for each in strips]
        ctx.save_for_backward(x, weight, *(one for each in strips for one in each))
        return y

    @staticmethod
    @differentiable_once("a spatial layer")
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        g: GridGeometry = ctx.geometry
        x, weight, *flat = ctx.saved_tensors
        ends = (0, *accumulate(ctx.counts))
        strips = [flat[a:b] for a, b in pairwise(ends)]
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        of_weight: Any = None
        of_window: Any = None
        if for_x:
            of_window = x.new_zeros(_shape(x, g.whole_window, g))
        for out in g.borders:
            box = g.in_window(g.reads(out))
            wide = _box(x, strips, len(g.dims), box, g)
            part = g.of_output(gradient, out)
            of_wide, more = _gradients(part, wide, weight, g, for_x, for_weight)
            of_weight = added(of_weight, more)
            if for_x:
                _narrowed(of_window, box, g).add_(of_wide)
        back = _Back(x, of_window, g) if for_x else None
        if back is not None:
            back.start()
        inner = None if g.interior is None else g.of_piece(x, g.reads(g.interior))
        if inner is not None and for_weight:
            assert g.interior is not None
            part = g.of_output(gradient, g.interior)
            more = _gradients(part, inner, weight, g, False, True)[1]
            of_weight = added(of_weight, more)
        if for_weight and of_weight is None:
            of_weight = torch.zeros_like(weight)
        weights = GradientSum(
            [
                of_weight if for_weight else None,
                gradient.sum((0, *range(2, x.dim()))) if for_bias else None,
            ],
            g.sum_over,
        )
        of_x: Any = None
        if back is not None:
            back.go_on()
            of_inner: Any = None
            if inner is not None:
                assert g.interior is not None
                part = g.of_output(gradient, g.interior)
                of_inner = _gradients(part, inner, weight, g, True, False)[0]
            of_x = back.finish()
            if of_inner is not None:
                assert g.interior is not None
                g.of_piece(of_x, g.reads(g.interior)).add_(of_inner)
        return of_x, *weights.wait(), None


# -- the window, and boxes of it -------------------------------------------------------


def _sources(
    x: Any, strips: Sequence[Sequence[Any]], level: int, g: GridGeometry
) -> Iterator[_Source]:
    """Yield the piece and the strips of the exchanges before ``level``.

    Along dimensions before ``level`` places count in the window, along the others in
    the piece. A source that has no elements of the window is missing.
    """
    places = []
    for number, each in enumerate(g.dims):
        size = x.shape[each.dim]
        kept = each.transfers.kept
        if number >= level:
            places.append(_Place(0, size, 0))
        elif kept:
            (low, high, at) = kept[0]
            places.append(_Place(at, at + high - low, low))
        else:
            places.append(_Place(0, 0, 0))
    yield _Source(x, tuple(places))
    for number in range(level):
        before = [_Place(0, high, 0) for _, high in g.whole_window[:number]]
        for message, strip in zip(
            g.dims[number].transfers.recvs, strips[number], strict=True
        ):
            own = _Place(message.low, message.high, 0)
            yield _Source(strip, (*before, own, *places[number + 1 :]))


def _box(
    x: Any, strips: Sequence[Sequence[Any]], level: int, box: Box, g: GridGeometry
) -> Any:
    """Return elements of the window as it is before ``level``, zeros as padding."""
    out = x.new_zeros(_shape(x, box, g))
    for source in _sources(x, strips, level, g):
        into, part = out, source.x
        for each, place, (low, high) in zip(g.dims, source.places, box, strict=True):
            first, last = meet((place.low, place.high), (low, high))
            into = into.narrow(each.dim, min(first - low, high - low), last - first)
            start = place.start + first - place.low if first < last else 0
            part = part.narrow(each.dim, start, last - first)
        if into.numel():
            into.copy_(part)
    return out


def _shape(x: Any, box: Box, g: GridGeometry) -> list[int]:
    shape = [*x.shape]
    for each, (low, high) in zip(g.dims, box, strict=True):
        shape[each.dim] = high - low
    return shape


def _narrowed(x: Any, box: Box, g: GridGeometry) -> Any:
    for each, (low, high) in zip(g.dims, box, strict=True):
        x = x.narrow(each.dim, low, high - low)
    return x


def _started(
    x: Any, strips: Sequence[Sequence[Any]], level: int, g: GridGeometry
) -> Strips:
    """Start the exchange along one dimension."""
    one = g.dims[level]
    whole = [
        g.whole_window[number] if number < level else (0, x.shape[each.dim])
        for number, each in enumerate(g.dims)
    ]

    def box_of(low: int, high: int) -> Box:
        return (*whole[:level], (low, high), *whole[level + 1 :])

    leaving = [
        _box(x, strips, level, box_of(low, high), g)
        for _, low, high in one.transfers.sends
    ]
    coming = [
        x.new_empty(_shape(x, box_of(low, high), g))
        for _, low, high in one.transfers.recvs
    ]
    moved = one.transfers
    return start_messages(one.cut.comm, leaving, moved.sends, coming, moved.recvs)


class _Back:
    """The gradient of a window on its way to the ranks that have its elements.

    Args:
        x: this rank's piece.
        gradient: of the window; it is changed.
        g: the convolution.
    """

    def __init__(self, x: Any, gradient: Any, g: GridGeometry) -> None:
        self._sizes = x.shape
        self._gradient = gradient
        self._left = [*g.dims]
        self._coming: Strips | None = None
        self._at: CutDimension | None = None

    def start(self) -> None:
        """Start the exchange of the last dimension that is left."""
        if not self._left:
            return
        self._at = one = self._left.pop()
        moved, dim = one.transfers, one.dim
        leaving = [
            self._gradient.narrow(dim, low, high - low).contiguous()
            for _, low, high in moved.recvs
        ]
        shape = [*self._gradient.shape]
        coming = []
        for _, low, high in moved.sends:
            shape[dim] = high - low
            coming.append(self._gradient.new_empty(shape))
        self._coming = start_messages(
            one.cut.comm, leaving, moved.recvs, coming, moved.sends
        )
        shape[dim] = self._sizes[dim]
        kept = moved.kept
        if len(kept) == 1 and kept[0][:2] == (0, shape[dim]):
            self._gradient = self._gradient.narrow(dim, kept[0].at, shape[dim])
            return
        mine = self._gradient.new_zeros(shape)
        for low, high, at in kept:
            part = self._gradient.narrow(dim, at, high - low)
            mine.narrow(dim, low, high - low).copy_(part)
        self._gradient = mine

    def go_on(self) -> None:
        """Wait for the exchange that is under way, and start the one before it."""
        self._end()
        self.start()

    def finish(self) -> Any:
        """Return the gradient of the piece."""
        self._end()
        while self._left:
            self.start()
            self._end()
        return self._gradient.contiguous()

    def _end(self) -> None:
        if self._coming is None or self._at is None:
            return
        one, strips = self._at, self._coming.wait()
        for (_, low, high), strip in zip(one.transfers.sends, strips, strict=True):
            self._gradient.narrow(one.dim, low, high - low).add_(strip)
        self._coming = None


# -- torch's convolution ---------------------------------------------------------------


def _convolved(x: Any, weight: Any, bias: Any, g: GridGeometry) -> Any:
    zeros = [0] * len(g.stride)
    return torch.convolution(
        *(x, weight, bias, g.stride, g.padding, g.dilation, False, zeros, g.groups)
    )


def _gradients(
    gradient: Any, x: Any, weight: Any, g: GridGeometry, for_x: bool, for_weight: bool
) -> tuple[Any, Any]:
    how = g.stride, g.padding, g.dilation, g.groups
    return plain_gradients(gradient, x, weight, how, for_x, for_weight)
