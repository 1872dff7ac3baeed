# SPDX-License-Identifier: Apache-2.0
"""Outputs of one rank along a cut dimension: those that need a halo, and the others.

Outputs that read this rank's piece alone, or padding, are the *interior*; the others
are *borders*. What borders read comes from the piece and from strips of other ranks;
their gradients go back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.windows import (
    Kernel,
    Message,
    Range,
    Transfers,
    clipped,
    meet,
)
from commrt.layers.spatial.windows import transfers as transfers_of

__all__ = ["OutputSplit", "is_apart"]


def is_apart(overlap: bool | None, cut: Cut) -> bool:
    """Return whether outputs that need no halo are computed while it travels.

    ``overlap``: as asked for; None: where the cut leaves this node. Inside of one a
    halo comes sooner than the borders are computed apart.
    """
    return len(cut.comm.nodes) > 1 if overlap is None else overlap


class _Overlap(NamedTuple):
    """Where an input meets a source: its number, places in both, and the length."""

    source: int
    at: int
    start: int
    length: int


@dataclass(frozen=True)
class OutputSplit:
    """How the outputs of an operation along a cut dimension are computed.

    Args:
        dim: the dimension of the tensor that is cut.
        cut: how the input is cut there.
        kernel: what outputs read in this dimension.
        outputs: each rank's outputs in this dimension.
        is_apart: outputs that need no halo are computed while it travels.
        is_empty: this rank computes none, as another dimension has none.
    """

    dim: int
    cut: Cut
    kernel: Kernel
    outputs: tuple[Range, ...]
    is_apart: bool
    is_empty: bool

    @property
    def own(self) -> Range:
        """The elements that this rank has."""
        return self.cut.own

    @property
    def out(self) -> Range:
        """The outputs that this rank computes."""
        low, high = self.outputs[self.cut.comm.rank]
        return (low, low) if self.is_empty else (low, high)

    def reads(self, out: Range) -> Range:
        """Return the elements that some outputs read, padding included."""
        return self.kernel.reads(*out)

    @cached_property
    def transfers(self) -> Transfers:
        """The halo's messages."""
        windows = [clipped(*self.reads(out), self.cut.extent) for out in self.outputs]
        return transfers_of(self.cut.pieces, self.cut.comm.rank, windows)

    @cached_property
    def halo(self) -> list[Range]:
        """The elements of each message that comes."""
        first = self.reads(self.outputs[self.cut.comm.rank])[0]
        return [(first + low, first + high) for _, low, high in self.transfers.recvs]

    @cached_property
    def interior(self) -> Range:
        """The outputs that are computed before the halo is there."""
        nothing = self.out[0], self.out[0]
        if self.halo and (not self.is_apart or self.own[0] == self.own[1]):
            return nothing
        return self.kernel.within(self.own, self.cut.extent, self.out)

    @cached_property
    def borders(self) -> list[Range]:
        """The outputs that need halo, in one range or in two."""
        (low, high), (first, last) = self.out, self.interior
        if first == last:
            return [self.out] if low < high else []
        return [each for each in ((low, first), (last, high)) if each[0] < each[1]]

    # -- inputs and their gradients ----------------------------------------------------

    def input_of(self, out: Range, x: Any, halo: list[Any], fill: float = 0.0) -> Any:
        """Return what some outputs read, in one tensor, with ``fill`` as padding.

        It is a part of the piece ``x`` where that has all of it.
        """
        low, high = self.reads(out)
        if self.own[0] <= low and high <= self.own[1]:
            return x.narrow(self.dim, low - self.own[0], high - low)
        wide = self.own_input_of(out, x, fill)
        self.put_halo(wide, out, halo)
        return wide

    def own_input_of(self, out: Range, x: Any, fill: float = 0.0) -> Any:
        """Return what some outputs read, with ``fill`` also where the halo comes."""
        wide = self.empty_input_of(out, x, fill)
        for _, at, start, length in self._overlaps(out, [self.own]):
            wide.narrow(self.dim, at, length).copy_(x.narrow(self.dim, start, length))
        return wide

    def empty_input_of(self, out: Range, x: Any, fill: float = 0.0) -> Any:
        """Return a tensor of the shape of what some outputs read."""
        low, high = self.reads(out)
        shape = [*x.shape]
        shape[self.dim] = high - low
        return x.new_full(shape, fill) if fill else x.new_zeros(shape)

    def put_halo(self, wide: Any, out: Range, halo: list[Any]) -> None:
        """Write what came of other ranks to its places in what some outputs read."""
        for number, at, start, length in self._overlaps(out, self.halo if halo else []):
            strip = halo[number].narrow(self.dim, start, length)
            wide.narrow(self.dim, at, length).copy_(strip)

    def give_to_halo(self, of_wide: Any, out: Range, of_halo: list[Any]) -> None:
        """Add the gradient of what some outputs read to that of the halo."""
        for number, at, start, length in self._overlaps(out, self.halo):
            strip = of_halo[number].narrow(self.dim, start, length)
            strip.add_(of_wide.narrow(self.dim, at, length))

    def given_back(
        self, of_wide: Any, out: Range, of_x: Any | None, zeros: Callable[[], Any]
    ) -> Any:
        """Return ``of_x``, None as yet for 0, and the gradient of what outputs read.

        ``zeros`` returns a new gradient of the piece. The result may be ``of_x``
        itself, changed.
        """
        low, high = self.reads(out)
        if of_x is None and low <= self.own[0] and self.own[1] <= high:
            size = self.own[1] - self.own[0]
            return of_wide.narrow(self.dim, self.own[0] - low, size).clone()
        total = zeros() if of_x is None else of_x
        for _, at, start, length in self._overlaps(out, [self.own]):
            part = of_wide.narrow(self.dim, at, length)
            total.narrow(self.dim, start, length).add_(part)
        return total

    def strip_like(self, x: Any, message: Message) -> Any:
        """Return an empty strip for a message, otherwise of the extents of ``x``."""
        shape = [*x.shape]
        shape[self.dim] = message.high - message.low
        return x.new_empty(shape)

    def _overlaps(self, out: Range, sources: list[Range]) -> Iterator[_Overlap]:
        """Yield where the input of some outputs meets each source, with its number."""
        reads = self.reads(out)
        for number, source in enumerate(sources):
            low, high = meet(reads, source)
            if low < high:
                yield _Overlap(number, low - reads[0], low - source[0], high - low)

    # -- results -----------------------------------------------------------------------

    def rows(self, y: Any, out: Range) -> Any:
        """Return some outputs of this rank's piece."""
        return y.narrow(self.dim, out[0] - self.out[0], out[1] - out[0])

    def together(self, parts: Sequence[tuple[Range, Any]]) -> Any:
        """Return this rank's piece of the output, from all of its parts."""
        ordered = [part for _, part in sorted(parts, key=lambda one: one[0])]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered, self.dim)
