# SPDX-License-Identifier: Apache-2.0
"""Halving-doubling (Rabenseifner): reduce-scatter by halving, allgather by doubling.

*Halving.* In each of log2 P steps a rank exchanges with the rank that differs in one
bit: each keeps one half of the blocks it still works on, sends the other half, and adds
what it receives to its own half. At the end each rank has the full sum of one P-th.
*Doubling.* The same exchanges backwards, now with finished blocks.

An allreduce takes the nearest rank first, while the pieces are largest; a
reduce_scatter takes the farthest first, so that rank v ends with block v. Reduce ends
with a gather to the root instead of the doubling; broadcast starts with a binomial
scatter instead of the halving. Other P fold (see recursive_doubling): a pair's sums are
made by its even rank.

Cost for a power of two: each half log2 P alpha + (P-1)/P N beta, halving also
(P-1)/P N gamma. Bandwidth-optimal with few steps. Folding adds 2 (alpha + N beta).

Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, section 4;
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.2, 4.4 and 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from commrt.algorithms._fold import Fold
from commrt.algorithms._registry import algorithm
from commrt.algorithms.binomial import scatter_blocks
from commrt.algorithms.recursive_doubling import double_blocks
from commrt.schedule.builder import Buffer, Builder
from commrt.schedule.ir import Slice


class Round(NamedTuple):
    """One exchange of the halving: with whom, what the rank kept, what it sent."""

    bit: int
    peer: int
    kept: Slice
    sent: Slice


def halve(
    b: Builder,
    buf: Buffer,
    bits: Iterable[int],
    at: Callable[[int, int], slice] = slice,
) -> list[Round]:
    """Leave the sum of one part of ``buf`` on each rank; return the exchanges.

    Args:
        b: ranks, a power of two.
        buf: blocks to halve: those of ranks ``[lo, hi)`` are ``buf[at(lo, hi)]``.
        bits: the bit of the rank number in which partners differ, step by step.
        at: blocks of a range of ranks; one block each, if left out.
    """
    lo, hi = 0, b.size
    rounds = []
    for bit in bits:
        middle = (lo + hi) // 2
        peer = b.rank ^ (1 << bit)
        low, high = buf[at(lo, middle)], buf[at(middle, hi)]
        if b.rank >> bit & 1:
            kept, sent, lo = high, low, middle
        else:
            kept, sent, hi = low, high, middle
        b.send(sent, peer)
        b.rred(kept, peer)
        rounds.append(Round(bit, peer, kept, sent))
    return rounds


def double(b: Builder, rounds: Iterable[Round]) -> None:
    """Undo the halving: exchange finished parts with the same partners, backwards."""
    for one in reversed(list(rounds)):
        b.send(one.kept, one.peer)
        b.recv(one.sent, one.peer)


@algorithm("allreduce", "halving_doubling", complexity=90, bandwidth=True)
def allreduce(b: Builder) -> None:
    """Halve with the nearest rank first, then double backwards."""
    fold = Fold(b)
    b.blocks(fold.num)
    if fold.folded:
        b.send(b.inp[:], b.rank - 1)
        b.recv(b.out[:], b.rank - 1)
        return
    b.copy(b.out[:], b.inp[:])
    if fold.folds:
        b.rred(b.out[:], b.rank + 1)
    group = fold.group()
    double(group, halve(group, b.out, range(fold.steps)))
    if fold.folds:
        b.send(b.out[:], b.rank + 1)


@algorithm(
    "reduce_scatter", "halving_doubling", complexity=90, latency=True, bandwidth=True
)
def reduce_scatter(b: Builder) -> None:
    """Halve with the farthest rank first."""
    fold = Fold(b)
    if fold.folded:
        b.send(b.inp[:], b.rank - 1)
        b.recv(b.out[0], b.rank - 1)
        return
    sums = b.tmp(b.size)
    b.copy(sums[:], b.inp[:])
    if fold.folds:
        b.rred(sums[:], b.rank + 1)
    halve(fold.group(), sums, reversed(range(fold.steps)), fold.blocks)
    b.copy(b.out[0], sums[b.rank])
    if fold.folds:
        b.send(sums[b.rank + 1], b.rank + 1)


@algorithm("reduce", "halving_doubling", complexity=90, bandwidth=True)
def reduce(b: Builder) -> None:
    """Halve with the nearest rank first, then gather to the root backwards."""
    fold = Fold(b)
    b.blocks(fold.num)
    if fold.folded:
        b.send(b.inp[:], b.rank - 1)
        if b.rank == b.root:
            b.recv(b.out[:], b.rank - 1)
        return
    sums = b.out if b.rank == b.root else b.tmp(b.nblk)
    b.copy(sums[:], b.inp[:])
    if fold.folds:
        b.rred(sums[:], b.rank + 1)
    group = fold.group()
    away = group.rank ^ fold.participant(b.root)
    for one in reversed(halve(group, sums, range(fold.steps))):
        if away >> one.bit & 1:
            group.send(one.kept, one.peer)
            return
        group.recv(one.sent, one.peer)
    if b.rank != b.root:
        b.send(sums[:], b.root)


@algorithm("bcast", "halving_doubling", complexity=90, bandwidth=True)
def bcast(b: Builder) -> None:
    """Scatter down a binomial tree, then double."""
    tree = b.sub((*range(b.root, b.size), *range(b.root)))
    fold = Fold(tree)
    b.blocks(fold.num)
    if fold.folded:
        tree.recv(b.out[:], tree.rank - 1)
        return
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
    group = fold.group()
    scatter_blocks(group, b.out)
    double_blocks(group, b.out, from_first=True)
    if fold.folds:
        tree.send(b.out[:], tree.rank + 1)
