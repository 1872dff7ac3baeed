# SPDX-License-Identifier: Apache-2.0
"""Dissemination (Bruck): step t talks to the rank 2^t further round; any P, no folding.

*Barrier*: in step t tell rank r+2^t, hear from rank r-2^t. After ceil(log2 P) steps
everyone has heard, directly or not, from everyone.
*Allgather*: keep the blocks of ranks r, r+1, ... in that order; in step t send all
known blocks to rank r-2^t and receive as many from rank r+2^t. Rotate at the end.
*Alltoall*: block i is on its way to the rank i further round; in step t every block
whose number has bit t moves 2^t ranks on. A block travels at most ceil(log2 P) times.

Cost: ceil(log2 P) alpha, and allgather (P-1)/P N beta, alltoall log2 P N/2 beta.
Latency-optimal.

Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17
(1988); Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE TPDS 8 (1997), sections 3, 4.
"""

from __future__ import annotations

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Builder


def distances(b: Builder) -> list[int]:
    """Return 1, 2, 4, ... below the number of ranks."""
    return [1 << t for t in range((b.size - 1).bit_length())]


@algorithm("barrier", "dissemination", latency=True, bandwidth=True)
def barrier(b: Builder) -> None:
    """Tell the rank 1, 2, 4, ... further round what was heard so far."""
    heard = b.tmp(max(1, len(distances(b))))
    known = b.inp[0]
    for t, distance in enumerate(distances(b)):
        b.send(known, b.rank + distance)
        b.rred(heard[t], b.rank - distance, src=known)
        known = heard[t]
    b.copy(b.out[0], known)


@algorithm("allgather", "dissemination", latency=True)
def allgather(b: Builder) -> None:
    """Send all known blocks to the rank 1, 2, 4, ... back; rotate at the end."""
    known = b.tmp(b.size)
    b.copy(known[0], b.inp[0])
    for distance in distances(b):
        num = min(distance, b.size - distance)
        b.send(known[:num], b.rank - distance)
        b.recv(known[distance : distance + num], b.rank + distance)
    for i in range(b.size):
        b.copy(b.out[b.rank + i], known[i])


@algorithm("alltoall", "dissemination", latency=True)
def alltoall(b: Builder) -> None:
    """Move the blocks whose number has bit t by 2^t ranks, for each t."""
    where = [b.inp[b.rank + i] for i in range(b.size)]
    for distance in distances(b):
        moving = [i for i in range(b.size) if i & distance]
        packed, arrived = b.tmp(len(moving)), b.tmp(len(moving))
        for place, i in enumerate(moving):
            b.copy(packed[place], where[i])
            where[i] = arrived[place]
        b.send(packed[:], b.rank + distance)
        b.recv(arrived[:], b.rank - distance)
    # Only now: in place, the output's blocks are the input's.
    kept = b.tmp(1)
    b.copy(kept[0], where[0])
    for i in range(1, b.size):
        b.copy(b.out[b.rank - i], where[i])
    b.copy(b.out[b.rank], kept[0])
