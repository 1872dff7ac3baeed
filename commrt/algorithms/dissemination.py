# SPDX-License-Identifier: Apache-2.0
"""Dissemination (Bruck): step t talks to the rank 2^t further round; any P, no folding.

*Barrier*: in step t tell rank r+2^t, hear from rank r-2^t. After ceil(log2 P) steps
everyone has heard, directly or not, from everyone.
*Allgather*: keep the blocks of ranks r, r+1, ... in that order; in step t send all
known blocks to rank r-2^t and receive as many from rank r+2^t. Rotate at the end.
*Alltoall*: block i is on its way to the rank i further round. Written with radix k, i
has the digits d0, d1, ...; in step t every block whose digit t is d > 0 moves d k^t
ranks on: k-1 messages, one for each d, which need not wait for one another. A block
travels at most ceil(logk P) times.

Cost: ceil(log2 P) alpha, and allgather (P-1)/P N beta. Alltoall with radix 2:
log2 P (alpha + N/2 beta), latency-optimal; with radix k: logk P ((k-1) alpha +
(k-1)/k N beta), fewer bytes in more messages, up to `direct` with k = P.

Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17
(1988); Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE TPDS 8 (1997), sections 3, 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isqrt

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Buffer, Builder
from commrt.schedule.ir import ParamValue, Slice

_RADIX_TWO_ONLY = 4
"""Most ranks on which radix 2 stands alone: other radices are `direct`, or as slow."""
_FEW_RADICES = 8


def distances(b: Builder) -> list[int]:
    """Return 1, 2, 4, ... below the number of ranks."""
    return [1 << t for t in range((b.size - 1).bit_length())]


@algorithm("barrier", "dissemination", complexity=40, latency=True, bandwidth=True)
def barrier(b: Builder) -> None:
    """Tell the rank 1, 2, 4, ... further round what was heard so far."""
    heard = b.tmp(max(1, len(distances(b))))
    known = b.inp[0]
    for t, distance in enumerate(distances(b)):
        b.send(known, b.rank + distance)
        b.rred(heard[t], b.rank - distance, src=known)
        known = heard[t]
    b.copy(b.out[0], known)


@algorithm("allgather", "dissemination", complexity=40, own_places=True, latency=True)
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


def radices(size: int) -> dict[str, tuple[int, ...]]:
    """Return the radices that differ on so many ranks."""
    return {"radix": tuple(range(2, max(size, 2) + 1))}


def _is_offered(size: int, params: Mapping[str, ParamValue]) -> bool:
    """Return whether a radix is worth a try: two, two digits in all, and among many
    ranks four and eight.

    Those between have hardly fewer messages than one of these, and hardly fewer bytes
    than another one; as large as there are ranks, it is `direct` with copies.
    """
    tried = {2}
    if size > _RADIX_TWO_ONLY:
        tried.add(isqrt(size - 1) + 1)
    if size > _FEW_RADICES:
        tried.update((4, 8))
    return params["radix"] in tried


@algorithm(
    "alltoall",
    "dissemination",
    complexity=40,
    own_places=True,
    params=radices,
    offered=_is_offered,
    latency=True,
)
def alltoall(b: Builder) -> None:
    """Move the blocks whose number has digit d at place t by d k^t ranks."""
    where = [b.inp[b.rank + i] for i in range(b.size)]
    for together in moves(b.size, b.params["radix"]):
        arriving = [
            (_pack_and_send(b, where, distance, moving), distance)
            for distance, moving in together
        ]
        for arrived, distance in arriving:
            b.recv(arrived[:], b.rank - distance)
    # Only now: in place, the output's blocks are the input's.
    kept = b.tmp(1)
    b.copy(kept[0], where[0])
    for i in range(1, b.size):
        b.copy(b.out[b.rank - i], where[i])
    b.copy(b.out[b.rank], kept[0])


@lru_cache(maxsize=64)
def moves(size: int, radix: int) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Return, step by step, the distances and which blocks move as far; kept, because
    all ranks ask."""
    found = []
    unit = 1
    while unit < size:
        moving: list[list[int]] = [[] for _ in range(radix)]
        for block in range(size):
            moving[block // unit % radix].append(block)
        found.append(
            [
                (digit * unit, tuple(moving[digit]))
                for digit in range(1, radix)
                if digit * unit < size
            ]
        )
        unit *= radix
    return found


def _pack_and_send(
    b: Builder, where: list[Slice], distance: int, moving: Sequence[int]
) -> Buffer:
    """Send the blocks that move by ``distance``; return where as many arrive."""
    packed, arrived = b.tmp(len(moving)), b.tmp(len(moving))
    for place, i in enumerate(moving):
        b.copy(packed[place], where[i])
        where[i] = arrived[place]
    b.send(packed[:], b.rank + distance)
    return arrived
