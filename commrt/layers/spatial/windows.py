# SPDX-License-Identifier: Apache-2.0
"""Which elements of a cut dimension a rank needs, and who has them. Integers only.

A *range* is ``(low, high)`` without ``high``. A *window* is what one rank needs of a
dimension: a row of ``length`` elements, of which some come from the tensor. The others
are room, which the operation fills: the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

__all__ = [
    "Kernel",
    "Message",
    "Part",
    "Range",
    "Sliding",
    "Spreading",
    "Transfers",
    "Window",
    "adaptive_outputs",
    "adaptive_window",
    "clipped",
    "even_ranges",
    "even_sizes",
    "meet",
    "source_of",
    "transfers",
    "wrapped",
]

Range = tuple[int, int]


@lru_cache(maxsize=4096)
def even_ranges(extent: int, parts: int) -> tuple[Range, ...]:
    """Return p even pieces of n elements: ``[i * n // p, (i + 1) * n // p)``."""
    ends = [extent * part // parts for part in range(parts + 1)]
    return tuple(pairwise(ends))


def even_sizes(extent: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of even pieces."""
    return tuple(high - low for low, high in even_ranges(extent, parts))


def meet(one: Range, other: Range) -> Range:
    """Return what two ranges share; an empty range has ``high == low``."""
    low = max(one[0], other[0])
    return low, max(low, min(one[1], other[1]))


# -- windows ---------------------------------------------------------------------------


class Part(NamedTuple):
    """Elements ``[low, high)`` of the whole dimension, at place ``at`` of a window."""

    low: int
    high: int
    at: int


@dataclass(frozen=True)
class Window:
    """The elements of a dimension that a rank needs: ``parts`` of ``length`` in all."""

    length: int
    parts: tuple[Part, ...]


@lru_cache(maxsize=4096)
def clipped(low: int, high: int, extent: int) -> Window:
    """Return the window of ``[low, high)``, with room where it leaves the dimension."""
    inside = meet((low, high), (0, extent))
    if inside[0] >= inside[1]:
        return Window(max(0, high - low), ())
    return Window(high - low, (Part(*inside, inside[0] - low),))


@lru_cache(maxsize=4096)
def wrapped(low: int, high: int, extent: int) -> Window:
    """Return the window of ``[low, high)`` of a dimension whose ends meet."""
    parts = []
    at = low
    while at < high:
        first = at % extent
        length = min(high - at, extent - first)
        parts.append(Part(first, first + length, at - low))
        at += length
    return Window(max(0, high - low), tuple(parts))


def source_of(place: int, extent: int, mode: str) -> int:
    """Return which element stands at a place of a padded dimension.

    Args:
        place: below 0 before the dimension, from ``extent`` on behind it.
        extent: of the dimension.
        mode: "reflect" (without the edge), "replicate" or "circular".
    """
    if mode == "circular":
        return place % extent
    if mode == "replicate":
        return min(max(place, 0), extent - 1)
    if place < 0:
        return -place
    return place if place < extent else 2 * (extent - 1) - place


# -- operations that slide a kernel ----------------------------------------------------


class Kernel(Protocol):
    """A kernel along one dimension: ``Sliding`` or ``Spreading``."""

    def reads(self, low: int, high: int) -> Range:
        """Return the elements that outputs ``[low, high)`` read, padding included."""
        ...

    def within(self, own: Range, extent: int, outputs: Range) -> Range:
        """Return those of some outputs that read nothing outside ``own`` but padding.

        An empty range where there is none.
        """
        ...


@dataclass(frozen=True)
class Sliding:
    """A kernel that slides along one dimension: convolution and pooling.

    ``low`` and ``high`` are the padding before and behind. With ``ceil`` the last
    window may leave the padded dimension, if it begins before the padding behind.
    """

    kernel: int
    stride: int = 1
    low: int = 0
    high: int = 0
    dilation: int = 1
    ceil: bool = False

    @property
    def span(self) -> int:
        """Elements from the first to the last that one window reads."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, extent: int) -> int:
        """Return how many windows a dimension has; 0 or less where it has none."""
        room = extent + self.low + self.high - self.span
        if not self.ceil:
            return room // self.stride + 1
        number = -(-room // self.stride) + 1
        return number - ((number - 1) * self.stride >= extent + self.low)

    def reads(self, low: int, high: int) -> Range:
        """Return the elements that outputs ``[low, high)`` read, padding included."""
        if high <= low:
            return low * self.stride - self.low, low * self.stride - self.low
        first = low * self.stride - self.low
        return first, (high - 1) * self.stride - self.low + self.span

    def within(self, own: Range, extent: int, outputs: Range) -> Range:
        """Return those of some outputs that read nothing outside ``own`` but padding.

        An empty range where there is none.
        """
        low, high = outputs
        if own[0] > 0:  # the first window that begins at own[0] or behind
            low = max(low, -(-(own[0] + self.low) // self.stride))
        if own[1] < extent:  # the last window that ends at own[1] or before
            high = min(high, (own[1] + self.low - self.span) // self.stride + 1)
        return (low, high) if low < high else (outputs[0], outputs[0])


@dataclass(frozen=True)
class Spreading:
    """A kernel along one dimension of a transposed convolution.

    Input i contributes to outputs ``i * stride - padding + n * dilation``. ``more`` is
    the output padding: outputs behind the last.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    more: int = 0

    @property
    def reach(self) -> int:
        """Outputs from the first to the last that one input contributes to, less 1."""
        return (self.kernel - 1) * self.dilation

    def outputs(self, extent: int) -> int:
        """Return the outputs of a dimension."""
        return (
            (extent - 1) * self.stride - 2 * self.padding + self.reach + self.more + 1
        )

    def first(self, place: int) -> int:
        """Return the first output that an input contributes to; it may be below 0."""
        return place * self.stride - self.padding

    def reads(self, low: int, high: int) -> Range:
        """Return the inputs that contribute to outputs ``[low, high)``.

        Those outside of the dimension are 0.
        """
        if high <= low:
            return 0, 0
        first = -(-(low + self.padding - self.reach) // self.stride)
        last = (high - 1 + self.padding) // self.stride
        return first, last + 1

    def within(self, own: Range, extent: int, outputs: Range) -> Range:
        """Return those of some outputs to which no input outside ``own`` contributes.

        An empty range where there is none.
        """
        low, high = outputs
        if own[0] > 0:  # the input before contributes to the outputs up to here
            low = max(low, self.first(own[0] - 1) + self.reach + 1)
        if own[1] < extent:
            high = min(high, self.first(own[1]))
        return (low, high) if low < high else (outputs[0], outputs[0])


def adaptive_window(output: int, extent: int, outputs: int) -> Range:
    """Return the elements that an output of adaptive pooling takes."""
    return output * extent // outputs, -(-(output + 1) * extent // outputs)


def adaptive_outputs(piece: Range, extent: int, outputs: int) -> Range:
    """Return the outputs of adaptive pooling that take elements of a piece.

    At most one of them takes elements on both sides of a boundary.
    """
    low, high = piece
    if low >= high:
        return 0, 0
    return low * outputs // extent, -(-high * outputs // extent)


# -- messages --------------------------------------------------------------------------


class Message(NamedTuple):
    """Elements ``[low, high)`` of a piece or window, and the rank at the other end."""

    peer: int
    low: int
    high: int


class Transfers(NamedTuple):
    """Parts that one rank sends of its piece, receives into its window, and keeps.

    ``kept`` are parts of the own piece: ``low`` and ``high`` count from its beginning.
    Messages of two ranks have the same order at both ends.
    """

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    kept: tuple[Part, ...]


def transfers(
    pieces: Sequence[Range], rank: int, windows: Sequence[Window]
) -> Transfers:
    """Return what a rank has to move so that every rank has its window.

    Args:
        pieces: which elements each rank has.
        rank: the rank that asks.
        windows: what each rank needs.
    """
    return _transfers(tuple(pieces), rank, tuple(windows))


@lru_cache(maxsize=4096)
def _transfers(
    pieces: tuple[Range, ...], rank: int, windows: tuple[Window, ...]
) -> Transfers:
    own = pieces[rank]
    sends, recvs, kept = [], [], []
    for peer, window in enumerate(windows):
        for part in window.parts if peer != rank else ():
            low, high = meet(own, (part.low, part.high))
            if low < high:
                sends.append(Message(peer, low - own[0], high - own[0]))
    for part in windows[rank].parts:
        for peer, piece in enumerate(pieces):
            low, high = meet(piece, (part.low, part.high))
            at = low - part.low + part.at
            if low < high and peer == rank:
                kept.append(Part(low - own[0], high - own[0], at))
            elif low < high:
                recvs.append(Message(peer, at, at + high - low))
    return Transfers(tuple(sends), tuple(recvs), tuple(kept))
