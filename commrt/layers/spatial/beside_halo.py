# SPDX-License-Identifier: Apache-2.0
"""Outputs along a cut dimension, of which most are computed while the halo travels.

    y = beside_halo(x, split, lambda wide, out: pooled(wide), shape)

This rank's interior is computed from its piece, then its borders from what came. The
backward pass has the order that autograd gives: the latest operations first. So the
gradients of the borders come first, and those of the halo travel to their owners while
the gradient of the interior is computed.

Pattern and bytes are those of ``exchange.window``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.spatial.empty_results import empty_result
from commrt.layers.spatial.exchange import Strips, start_messages, start_strips
from commrt.layers.spatial.output_split import OutputSplit
from commrt.layers.spatial.windows import Range

__all__ = ["beside_halo"]


def beside_halo(
    x: Any,
    split: OutputSplit,
    compute: Callable[[Any, Range], Any],
    shape: Sequence[int],
    fill: float = 0.0,
) -> Any:
    """Return this rank's outputs.

    Args:
        x: this rank's piece.
        split: the outputs, those that need no halo apart.
        compute: returns some outputs from the elements that they read, padding
            included. It is differentiable.
        shape: of this rank's piece of the output.
        fill: the value of padding.

    Collective over the cut's ranks, also in the backward pass, which cannot be
    differentiated once more. ``x`` must need a gradient on all ranks or on none.
    """
    trip = _Trip(split, fill)
    inner, *begun = _Begin.apply(x, trip)
    parts = []
    try:
        if split.interior[0] < split.interior[1]:
            parts.append((split.interior, compute(inner, split.interior)))
        if begun:
            wides = _Complete.apply(trip, *begun)
            for out, wide in zip(split.borders, wides, strict=True):
                parts.append((out, compute(wide, out)))
    finally:
        trip.finish()
    return split.together(parts) if parts else empty_result(shape, inner)


class _Trip:
    """The halo of one operation on its way here, and its gradient on its way back."""

    def __init__(self, split: OutputSplit, fill: float) -> None:
        self.split, self.fill = split, fill
        self._coming: Strips | None = None
        self._returning: Strips | None = None

    def start(self, x: Any) -> None:
        """Send what others need of the piece ``x``."""
        split, moved = self.split, self.split.transfers
        self._coming = start_strips(
            x, split.dim, split.cut.comm, moved.sends, moved.recvs
        )

    def arrived(self) -> list[Any]:
        """Wait for the halo, and return it."""
        coming, self._coming = self._coming, None
        assert coming is not None
        return coming.wait()

    def finish(self) -> None:
        """Wait for what is still under way.

        Where no border waits for it, others may yet need what this rank sends. And
        torch's checkpoints leave a recomputation before its end, by an exception.
        """
        if self._coming is not None:
            self.arrived()

    def send_back(self, of_halo: Sequence[Any], like: Any) -> None:
        """Send the gradient of the halo to its owners.

        ``like`` is a tensor with the other extents of the piece.
        """
        split, moved = self.split, self.split.transfers
        coming = [split.strip_like(like, each) for each in moved.sends]
        self._returning = start_messages(
            split.cut.comm, [*of_halo], moved.recvs, coming, moved.sends
        )

    def returned(self, like: Any) -> list[Any]:
        """Wait for the gradients of what this rank sent, and return them."""
        if self._returning is None:  # no output here needed a halo
            self.send_back(self.zeros(like), like)
        returning, self._returning = self._returning, None
        assert returning is not None
        return returning.wait()

    def zeros(self, like: Any) -> list[Any]:
        """Return gradients of the halo that are 0."""
        recvs = self.split.transfers.recvs
        return [self.split.strip_like(like, each).zero_() for each in recvs]


class _Begin(torch.autograd.Function):  # type: ignore[misc]
    """``apply(x, trip)`` returns the input of the interior, and those of borders.

    The latter lack the halo, which is on its way. Without an interior the first has no
    elements.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, trip: _Trip) -> tuple[Any, ...]:
        split = trip.split
        trip.start(x)
        ctx.trip, ctx.shape = trip, x.shape
        low, high = split.interior
        if low < high:
            inner = split.input_of(split.interior, x, [], trip.fill)
        else:
            inner = x.narrow(split.dim, 0, 0)
        return inner, *(split.own_input_of(out, x, trip.fill) for out in split.borders)

    @staticmethod
    @differentiable_once("a spatial layer")
    def backward(ctx: Any, of_inner: Any, *of_borders: Any) -> tuple[Any, ...]:
        trip: _Trip = ctx.trip
        split = trip.split

        def zeros() -> Any:
            return of_inner.new_zeros(ctx.shape)

        of_x: Any = None
        low, high = split.interior
        if low < high:
            of_x = split.given_back(of_inner, split.interior, None, zeros)
        for out, of_wide in zip(split.borders, of_borders, strict=True):
            of_x = split.given_back(of_wide, out, of_x, zeros)
        if of_x is None:
            of_x = zeros()
        sends = split.transfers.sends
        for (_, first, last), strip in zip(sends, trip.returned(of_inner), strict=True):
            of_x.narrow(split.dim, first, last - first).add_(strip)
        return of_x, None


class _Complete(torch.autograd.Function):  # type: ignore[misc]
    """``apply(trip, *wides)`` returns the inputs of borders, with the halo."""

    @staticmethod
    def forward(ctx: Any, trip: _Trip, *wides: Any) -> tuple[Any, ...]:
        halo = trip.arrived()
        for out, wide in zip(trip.split.borders, wides, strict=True):
            trip.split.put_halo(wide, out, halo)
        ctx.trip = trip
        ctx.mark_dirty(*wides)
        return wides

    @staticmethod
    @differentiable_once("a spatial layer")
    def backward(ctx: Any, *of_wides: Any) -> tuple[Any, ...]:
        trip: _Trip = ctx.trip
        split, like = trip.split, of_wides[0]
        of_halo = trip.zeros(like)
        for out, of_wide in zip(split.borders, of_wides, strict=True):
            split.give_to_halo(of_wide, out, of_halo)
        trip.send_back(of_halo, like)
        return None, *of_wides
