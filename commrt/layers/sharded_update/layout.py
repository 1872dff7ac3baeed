# SPDX-License-Identifier: Apache-2.0
"""Pieces of a bucket: the elements of its parameters that each rank updates.

A bucket's parameters lie one behind another in a flat buffer. The buffer is cut evenly
among the ranks, or each parameter is one rank's as a whole. All of it follows from the
parameters' lengths, so all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commrt.layers.spatial.windows import even_ranges

__all__ = ["ALIGNMENT", "Layout", "Piece", "cut_evenly", "cut_whole", "owners"]


ALIGNMENT = 64
"""Elements. Kernels of torch treat the last few of a tensor, which fill no vector, by
other instructions, whose rounding may differ. So a piece ends where the parameter does,
or behind full vectors."""


@dataclass(frozen=True, order=True)
class Piece:
    """A run of one parameter's elements, which one rank updates."""

    index: int
    """The parameter's place in its bucket."""
    low: int
    """The first of the elements, in the order of memory."""
    high: int
    """The first one behind them."""

    @property
    def count(self) -> int:
        """How many elements it has."""
        return self.high - self.low


@dataclass(frozen=True)
class Layout:
    """The pieces of a bucket, rank by rank, in the order of the flat buffer."""

    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The elements of each rank."""
        return tuple(sum(piece.count for piece in own) for own in self.pieces)

    def of(self, present: Sequence[bool]) -> Layout:
        """Return the layout of those parameters that are present; others are left out.

        What stays is the same rank's as before.
        """
        return Layout(
            tuple(
                tuple(piece for piece in own if present[piece.index])
                for own in self.pieces
            )
        )


def cut_evenly(counts: Sequence[int], ranks: int) -> Layout:
    """Return the layout in which ranks have about as many elements.

    Each end lies within ``ALIGNMENT / 2`` elements of the even one, as parameters are
    cut at multiples of ``ALIGNMENT`` elements, or at their ends.

    Args:
        counts: the elements of each parameter. One without elements is rank 0's.
        ranks: how many there are.
    """
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    ranges = even_ranges(sum(counts), ranks)
    first = 0
    for index, count in enumerate(counts):
        for own, (low, high) in zip(pieces, ranges, strict=True):
            begin, end = (_aligned(end - first, count) for end in (low, high))
            if begin < end:
                own.append(Piece(index, begin, end))
        if not count:
            pieces[0].append(Piece(index, 0, 0))
        first += count
    return Layout(tuple(map(tuple, pieces)))


def _aligned(place: int, count: int) -> int:
    """Return the place nearest to another one at which a parameter may be cut."""
    if place <= 0 or place >= count:
        return min(max(place, 0), count)
    below = place // ALIGNMENT * ALIGNMENT
    above = min(below + ALIGNMENT, count)
    return below if place - below <= above - place else above


def cut_whole(counts: Sequence[int], owner: Sequence[int], ranks: int) -> Layout:
    """Return the layout in which each parameter is one rank's.

    Args:
        counts: the elements of each parameter.
        owner: the rank of each.
        ranks: how many there are.
    """
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for index, (count, rank) in enumerate(zip(counts, owner, strict=True)):
        pieces[rank].append(Piece(index, 0, count))
    return Layout(tuple(map(tuple, pieces)))


def owners(nbytes: Sequence[int], loads: list[int]) -> list[int]:
    """Return the rank that has each parameter, so that ranks have about as many bytes.

    The largest parameter goes first, each to the rank with the least. No rank has more
    than the mean and the largest parameter.

    Args:
        nbytes: of each parameter.
        loads: bytes that each rank has already; it is brought up to date.
    """
    found = [0] * len(nbytes)
    for index in sorted(range(len(nbytes)), key=lambda at: (-nbytes[at], at)):
        rank = loads.index(min(loads))
        found[index] = rank
        loads[rank] += nbytes[index]
    return found
