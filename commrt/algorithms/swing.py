# SPDX-License-Identifier: Apache-2.0
"""Swing: as many steps as halving-doubling has, between ranks that are near on a torus.

In step s rank r exchanges with r + d(s) if it is even and with r - d(s) if it is odd,
round the ring, where d(s) = 1 - 2 + 4 - ... (s + 1 terms) = 1, -1, 3, -5, 11, ...:
partners swing from one side to the other. Recursive doubling goes 1, 2, 4, ... away;
those of Swing are a third shorter, and that much less load lies on the links of a ring
or a torus, where it is the distance that costs. On a switched network or within a node
it is what halving-doubling is.

*form=halving* moves few bytes: in each step a rank keeps one half of the blocks that it
still works on, sends the other half and adds what it receives to its own; then the
same exchanges backwards, with finished blocks. The blocks that a rank reaches in later
steps are those that it keeps; they are numbered so that they lie together. *form=whole*
takes few steps: it exchanges the whole vector each time.

On a torus, ``torus=4x8``, the steps visit the dimensions in turn, each with a swing of
its own; the last one changes fastest with the rank. *ports=all* cuts the vector into
2 D parts for D dimensions: each begins with another dimension or on the other side,
so that in every step all 2 D links of a rank are in use.

Ranks beyond a power of two fold (see recursive_doubling): a pair's sums are made by its
even rank.

Cost for a power of two: form=halving 2 log2 P alpha + 2(P-1)/P N beta + (P-1)/P N
gamma, form=whole log2 P (alpha + N beta + N gamma). Folding adds 2 (alpha + N beta).

Nothing in the model knows of links that messages share, so no call has it unasked: it
is for who names it, in a call, a table or COMMRT_ALGORITHM.

De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth
allreduce", NSDI 2024, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from commrt.algorithms._fold import Fold
from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Buffer, Builder
from commrt.schedule.ir import ParamValue, Slice

_RING = "ring"
_DIMENSIONS = 3


class Swing:
    """The partners of each round, for a power of two of ranks on a torus.

    Attributes:
        steps: how many exchanges there are.
    """

    def __init__(self, shape: tuple[int, ...], port: int) -> None:
        """Start with dimension ``port``, beyond their number on the other side."""
        self.size = prod(shape)
        self._shape = shape
        first, self._mirrored = port % len(shape), port >= len(shape)
        self._order = [*_in_turn(shape, first)]
        self.steps = len(self._order)
        self._peers = [
            [self._find_peer(rank, step) for rank in range(self.size)]
            for step in range(self.steps)
        ]
        self._classes = self._find_classes()

    def peer(self, rank: int, step: int) -> int:
        """Return the partner of ``rank``."""
        return self._peers[step][rank]

    def _find_peer(self, rank: int, step: int) -> int:
        dimension, number = self._order[step]
        length = self._shape[dimension]
        stride = prod(self._shape[dimension + 1 :])
        place = rank // stride % length
        distance: int = sum((-2) ** term for term in range(number + 1))
        if (place % 2 == 1) != self._mirrored:
            distance = -distance
        return rank + ((place + distance) % length - place) * stride

    def _find_classes(self) -> list[list[int]]:
        """Return, per step and rank, the first rank that is reached from there on.

        Ranks that reach each other in the same steps are a class: partners in a step
        are in the two halves of a class of the step before.
        """
        found = [list(range(self.size))]
        for step in reversed(range(self.steps)):
            later = found[0]
            peers = (self.peer(rank, step) for rank in range(self.size))
            found.insert(
                0, [min(later[rank], later[peer]) for rank, peer in enumerate(peers)]
            )
        return found

    def keeps_high(self, rank: int, step: int) -> bool:
        """Return whether ``rank`` keeps the second half of its blocks in a step."""
        return self._classes[step + 1][rank] != self._classes[step][rank]

    def place(self, rank: int) -> int:
        """Return the place of the block that ``rank`` is left with at the end."""
        found = 0
        for step in range(self.steps):
            found = 2 * found + self.keeps_high(rank, step)
        return found


def _in_turn(shape: tuple[int, ...], first: int) -> Iterator[tuple[int, int]]:
    """Yield dimension and number of its step, the dimensions in turn."""
    done = [0] * len(shape)
    dimension = first
    while any(1 << d < length for d, length in zip(done, shape, strict=True)):
        if 1 << done[dimension] < shape[dimension]:
            yield dimension, done[dimension]
            done[dimension] += 1
        dimension = (dimension + 1) % len(shape)


@lru_cache(maxsize=256)
def swing(shape: tuple[int, ...], port: int) -> Swing:
    """Return the partners of each step; kept, because all ranks ask."""
    return Swing(shape, port)


def shapes(size: int) -> dict[str, tuple[ParamValue, ...]]:
    """Return the tori that a power of two of ranks may lie on."""
    num = 1 << (size.bit_length() - 1)
    found = [*_factors(num, _DIMENSIONS)]
    tori = ("x".join(map(str, shape)) for shape in found if len(shape) > 1)
    return {
        "form": ("halving", "whole"),
        "torus": (_RING, *tori),
        "ports": (1, "all"),
    }


def _factors(num: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a power of two as a product of up to so many others."""
    yield (num,)
    if most == 1:
        return
    first = 2
    while first < num:
        for rest in _factors(num // first, most - 1):
            yield (first, *rest)
        first *= 2


def _by_name_only(size: int, params: Mapping[str, ParamValue]) -> bool:
    """Only who names it knows that the ranks lie on a torus: the model does not."""
    return False


@algorithm(
    "allreduce",
    "swing",
    complexity=170,
    params=shapes,
    offered=_by_name_only,
    latency=True,
    bandwidth=True,
)
def allreduce(b: Builder) -> None:
    """Exchange with the rank 1, 1, 3, 5, 11, ... away, on one side and the other."""
    torus = b.params["torus"]
    num = 1 << (b.size.bit_length() - 1)
    shape = (num,) if torus == _RING else tuple(map(int, torus.split("x")))
    ports = 2 * len(shape) if b.params["ports"] == "all" else 1
    exchange_all(b, shape, ports, halving=b.params["form"] == "halving")


def exchange_all(
    b: Builder, shape: tuple[int, ...], ports: int, *, halving: bool
) -> None:
    """Record an allreduce on a torus of ``shape``, its vector cut for so many ports."""
    fold = Fold(b)
    b.blocks(ports * fold.num if halving else ports)
    if fold.folded:
        b.send(b.inp[:], b.rank - 1)
        b.recv(b.out[:], b.rank - 1)
        return
    parts = b.out.grouped(ports)
    known = b.out if halving else b.tmp(b.nblk)
    b.copy(known[:], b.inp[:])
    if fold.folds:
        b.rred(known[:], b.rank + 1)
    group = fold.group()
    for port in range(ports):
        if halving:
            pattern, mine = swing(shape, port), parts.part(port)
            double(group, halve(group, pattern, mine))
        else:
            b.copy(parts[port], _whole(group, swing(shape, port), known, port))
    if fold.folds:
        b.send(b.out[:], b.rank + 1)


class Round(NamedTuple):
    """One exchange of the halving: with whom, what the rank kept, what it sent."""

    peer: int
    kept: Slice
    sent: Slice


def halve(
    b: Builder,
    pattern: Swing,
    mine: Buffer,
    at: Callable[[int, int], slice] = slice,
) -> list[Round]:
    """Leave the sum of one part of ``mine`` on each rank; return the exchanges.

    Args:
        b: ranks, as many as the pattern has.
        pattern: the partners.
        mine: blocks to halve: those at places ``[lo, hi)`` are ``mine[at(lo, hi)]``.
        at: blocks of a range of places; one block each, if left out.
    """
    lo, hi = 0, pattern.size
    rounds: list[Round] = []
    for step in range(pattern.steps):
        peer, middle = pattern.peer(b.rank, step), (lo + hi) // 2
        low, high = mine[at(lo, middle)], mine[at(middle, hi)]
        if pattern.keeps_high(b.rank, step):
            kept, sent, lo = high, low, middle
        else:
            kept, sent, hi = low, high, middle
        b.send(sent, peer)
        b.rred(kept, peer)
        rounds.append(Round(peer, kept, sent))
    return rounds


def double(b: Builder, rounds: Sequence[Round]) -> None:
    """Undo the halving: exchange finished parts with the same partners, backwards."""
    for one in reversed(rounds):
        b.send(one.kept, one.peer)
        b.recv(one.sent, one.peer)


def _whole(b: Builder, pattern: Swing, buf: Buffer, port: int) -> Slice:
    """Exchange and add a whole part with partner after partner; return the sum."""
    known = buf[port]
    # A value must stay while it is sent and the next sum is made: each sum has its own
    # place.
    for step in range(pattern.steps):
        peer, total = pattern.peer(b.rank, step), b.tmp(b.nblk)[port]
        b.send(known, peer)
        b.rred(total, peer, src=known)
        known = total
    return known
