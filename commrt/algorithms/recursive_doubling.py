# SPDX-License-Identifier: Apache-2.0
"""Recursive doubling: in step t every rank exchanges with the rank 2^t away.

After step t, the 2^(t+1) ranks that differ in the lowest t+1 bits know the same. An
allreduce exchanges the whole vector each time and adds; an allgather sends all blocks
known so far, twice as many in each step.

For P that is no power of two, the first 2(P-Q) ranks, Q = 2^floor(log2 P), pair up: the
odd rank gives its data to the even one before it, waits, and gets the result (*fold*).

A *scan* needs no exchange and no folding. In step t rank r sends the sum over its
*window*, the last 2^t ranks up to r (fewer where there are none), to rank r+2^t, which
puts it before its own: its window doubles. Once it begins at rank 0, that is the
result.
An *exscan* keeps two sums: of the window without r itself, which is the result in the
end, and, as long as there is somebody to send it to, that sum and r's own share.

Cost for a power of two: allreduce log2 P (alpha + N beta + N gamma); allgather
log2 P alpha + (P-1)/P N beta. Folding adds 2 messages. Scan, for any P,
ceil(log2 P) (alpha + N beta + N gamma); exscan twice the gamma. Latency-optimal.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.1 and 4.5; Hillis and Steele, "Data parallel
algorithms", CACM 29 (1986), for the scan; Sanders and Traff, "Parallel prefix (scan)
algorithms for MPI", EuroPVM/MPI 2006, for both scans among ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from commrt.algorithms._fold import Fold
from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Buffer, Builder


def double_blocks(
    b: Builder,
    buf: Buffer,
    at: Callable[[int, int], slice] = slice,
    *,
    from_first: bool = False,
) -> None:
    """Give every rank all blocks of ``buf``; rank v starts with ``at(v, v + 1)``.

    With ``from_first``, rank 0 has all blocks already and receives none.
    """
    for t in range(b.size.bit_length() - 1):
        distance = 1 << t
        peer = b.rank ^ distance
        mine, theirs = b.rank & -distance, peer & -distance
        if not (from_first and peer == 0):
            b.send(buf[at(mine, mine + distance)], peer)
        if not (from_first and b.rank == 0):
            b.recv(buf[at(theirs, theirs + distance)], peer)


@algorithm("allreduce", "recursive_doubling", complexity=20, latency=True)
def allreduce(b: Builder) -> None:
    """Exchange and add the whole vector with the rank 1, 2, 4, ... away."""
    b.blocks(1)
    fold = Fold(b)
    if fold.folded:
        b.send(b.inp[:], b.rank - 1)
        b.recv(b.out[:], b.rank - 1)
        return
    # A value must stay while it is sent and the next sum is made: each sum has its own
    # place.
    sums = b.tmp(fold.steps + 1)
    known = b.inp[:]
    if fold.folds:
        b.rred(sums[fold.steps], b.rank + 1, src=known)
        known = sums[fold.steps]
    group = fold.group()
    for t in range(fold.steps):
        peer = group.rank ^ (1 << t)
        group.send(known, peer)
        group.rred(sums[t], peer, src=known)
        known = sums[t]
    b.copy(b.out[:], known)
    if fold.folds:
        b.send(b.out[:], b.rank + 1)


@algorithm("allgather", "recursive_doubling", complexity=20, latency=True)
def allgather(b: Builder) -> None:
    """Exchange all blocks known so far with the rank 1, 2, 4, ... away."""
    b.copy(b.out[b.rank], b.inp[0])
    fold = Fold(b)
    if fold.folded:
        b.send(b.out[b.rank], b.rank - 1)
        b.recv(b.out[:], b.rank - 1)
        return
    if fold.folds:
        b.recv(b.out[b.rank + 1], b.rank + 1)
    double_blocks(fold.group(), b.out, fold.blocks)
    if fold.folds:
        b.send(b.out[:], b.rank + 1)


@algorithm("scan", "recursive_doubling", complexity=20, latency=True, ordered=True)
def scan(b: Builder) -> None:
    """Send the sum so far to the rank 1, 2, 4, ... further; put its sum before it."""
    b.blocks(1)
    steps = (b.size - 1).bit_length()
    sums = b.tmp(max(1, steps))
    known = b.inp[:]
    for t in range(steps):
        distance = 1 << t
        if b.rank + distance < b.size:
            b.send(known, b.rank + distance)
        if b.rank >= distance:
            b.rred(sums[t], b.rank - distance, src=known)
            known = sums[t]
    b.copy(b.out[:], known)


@algorithm("exscan", "recursive_doubling", complexity=20, latency=True, ordered=True)
def exscan(b: Builder) -> None:
    """Like scan, with one more sum: of the same ranks without this one."""
    b.blocks(1)
    steps = (b.size - 1).bit_length()
    below, upto = b.tmp(max(1, steps)), b.tmp(max(1, steps))
    total, known = None, b.inp[:]
    for t in range(steps):
        distance = 1 << t
        if b.rank + distance < b.size:
            b.send(known, b.rank + distance)
        if b.rank < distance:
            continue
        if total is None:
            b.recv(below[t], b.rank - distance)
        else:
            b.rred(below[t], b.rank - distance, src=total)
        total = below[t]
        if b.rank + 2 * distance < b.size:
            b.copy(upto[t], total)
            b.reduce(upto[t], b.inp[:])
            known = upto[t]
    if total is not None:
        b.copy(b.out[:], total)
