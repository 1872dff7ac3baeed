# SPDX-License-Identifier: Apache-2.0
"""Recursive doubling: in step t every rank exchanges with the rank 2^t away.

After step t, the 2^(t+1) ranks that differ in the lowest t+1 bits know the same. An
allreduce exchanges the whole vector each time and adds; an allgather sends all blocks
known so far, twice as many in each step.

For P that is no power of two, the first 2(P-Q) ranks, Q = 2^⌊log₂ P⌋, pair up: the odd
rank gives its data to the even one before it, waits, and gets the result (*fold*).

Cost for a power of two: allreduce log₂ P (α + Nβ + Nγ); allgather log₂ P α + (P-1)/P Nβ.
Folding adds 2 messages. Latency-optimal.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.1 and 4.5.
"""

from __future__ import annotations

from commrt.algorithms._fold import Fold
from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Buffer, Builder


def double_blocks(b: Builder, fold: Fold, buf: Buffer) -> None:
    """Give every participant all blocks of ``buf``; each starts with its own range."""
    v = fold.participant
    distance = 1
    while distance < fold.num:
        peer = v ^ distance
        mine, theirs = v & -distance, peer & -distance
        b.send(buf[fold.blocks(mine, mine + distance)], fold.ranks[peer])
        b.recv(buf[fold.blocks(theirs, theirs + distance)], fold.ranks[peer])
        distance *= 2


@algorithm("allreduce", "recursive_doubling", latency=True)
def allreduce(b: Builder) -> None:
    """Exchange and add the whole vector with the rank 1, 2, 4, … away."""
    b.blocks(1)
    fold = Fold(b)
    if fold.folded:
        b.send(b.inp[:], b.rank - 1)
        b.recv(b.out[:], b.rank - 1)
        return
    # What is sent must stay while the next sum is made: each sum has its own place.
    sums = b.tmp(fold.steps + 1)
    known = b.inp[:]
    if fold.folds:
        b.rred(sums[fold.steps], b.rank + 1, src=known)
        known = sums[fold.steps]
    for t in range(fold.steps):
        peer = fold.ranks[fold.participant ^ (1 << t)]
        b.send(known, peer)
        b.rred(sums[t], peer, src=known)
        known = sums[t]
    b.copy(b.out[:], known)
    if fold.folds:
        b.send(b.out[:], b.rank + 1)


@algorithm("allgather", "recursive_doubling", latency=True)
def allgather(b: Builder) -> None:
    """Exchange all blocks known so far with the rank 1, 2, 4, … away."""
    b.copy(b.out[b.rank], b.inp[0])
    fold = Fold(b)
    if fold.folded:
        b.send(b.out[b.rank], b.rank - 1)
        b.recv(b.out[:], b.rank - 1)
        return
    if fold.folds:
        b.recv(b.out[b.rank + 1], b.rank + 1)
    double_blocks(b, fold, b.out)
    if fold.folds:
        b.send(b.out[:], b.rank + 1)
