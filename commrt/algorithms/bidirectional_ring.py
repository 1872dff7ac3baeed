# SPDX-License-Identifier: Apache-2.0
"""Bidirectional ring: as `ring`, but blocks go both ways round and meet half-way.

With P ranks, L = ceil((P-1)/2) and R = floor((P-1)/2).
*Reduce-scatter.* Block c belongs to rank c. The L ranks before it add up their shares
on the way forward: rank c-L starts, rank c-1 sends the last partial sum to c. The R
ranks after it do so on the way back. Rank c adds both sums to its own share.
*Allgather.* Every block goes L ranks forward and R ranks back.

Cost on links that carry both directions at once: each half L alpha + (P-1)/(2P) N beta,
the first also (P-1)/P N gamma: half the steps and half the time of a ring. Where one
port must carry both ways, half the steps for the same bytes: (P-1)/P N beta.

The ring is that of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 69 (2009), section 3; both directions at once: Jain and
Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus interconnects",
ICS 2010, there for each dimension of a torus.
"""

from __future__ import annotations

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Buffer, Builder


def _reaches(b: Builder) -> tuple[int, int]:
    """Return the distances that blocks go forward and back."""
    return b.size // 2, (b.size - 1) // 2


def _reduce_scatter(b: Builder, buf: Buffer) -> None:
    """Leave the sum over all ranks of block r of ``buf`` in block r of rank r."""
    forward, back = _reaches(b)
    # Blocks ahead of this rank pass it forward only, those behind it back only.
    for t in range(forward):
        b.send(buf[b.rank + forward - t], b.rank + 1)
        if t < back:
            b.send(buf[b.rank - back + t], b.rank - 1)
        b.rred(buf[b.rank - 1 + forward - t], b.rank - 1)
        if t < back:
            b.rred(buf[b.rank + 1 - back + t], b.rank + 1)


def _allgather(b: Builder, buf: Buffer) -> None:
    """Give every rank block r of ``buf`` from each rank r."""
    forward, back = _reaches(b)
    for t in range(forward):
        b.send(buf[b.rank - t], b.rank + 1)
        if t < back:
            b.send(buf[b.rank + t], b.rank - 1)
        b.recv(buf[b.rank - 1 - t], b.rank - 1)
        if t < back:
            b.recv(buf[b.rank + 1 + t], b.rank + 1)


@algorithm("allreduce", "bidirectional_ring", complexity=70, bandwidth=True)
def allreduce(b: Builder) -> None:
    """Reduce-scatter from both sides, then allgather to both sides."""
    b.copy(b.out[:], b.inp[:])
    _reduce_scatter(b, b.out)
    _allgather(b, b.out)


@algorithm("reduce_scatter", "bidirectional_ring", complexity=70, bandwidth=True)
def reduce_scatter(b: Builder) -> None:
    """Partial sums come from both sides."""
    sums = b.tmp(b.size)
    b.copy(sums[:], b.inp[:])
    _reduce_scatter(b, sums)
    b.copy(b.out[0], sums[b.rank])


@algorithm("allgather", "bidirectional_ring", complexity=70, bandwidth=True)
def allgather(b: Builder) -> None:
    """Blocks go to both sides."""
    b.copy(b.out[b.rank], b.inp[0])
    _allgather(b, b.out)
