# SPDX-License-Identifier: Apache-2.0
"""Pairwise exchange: P-1 steps; in step t send to rank r+t and receive from rank r-t.

Every block goes straight to where it is needed. Unlike `direct`, a step starts when the
one before it is done, so each rank has one message in each direction under way: no link
or receiver is flooded, however many ranks there are.

Cost: (P-1) alpha + (P-1)/P N beta, for reduce_scatter also (P-1)/P N gamma.
Bandwidth-optimal.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.3 and 4.4.
"""

from __future__ import annotations

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Builder


@algorithm("alltoall", "pairwise", complexity=50, bandwidth=True)
def alltoall(b: Builder) -> None:
    """Exchange, in step t, with the ranks t further and t back."""
    # Received blocks wait in scratch until the input's block has left: in place, two
    # ranks would otherwise wait for each other.
    arrived = b.tmp(b.size)
    received = b.copy(b.out[b.rank], b.inp[b.rank])
    for t in range(1, b.size):
        b.after(received)
        b.send(b.inp[b.rank + t], b.rank + t)
        received = b.recv(arrived[b.rank - t], b.rank - t)
    for t in range(1, b.size):
        b.copy(b.out[b.rank - t], arrived[b.rank - t])


@algorithm("reduce_scatter", "pairwise", complexity=50, bandwidth=True)
def reduce_scatter(b: Builder) -> None:
    """Send, in step t, the block of the rank t further; add the one that comes."""
    received = b.copy(b.out[0], b.inp[b.rank])
    for t in range(1, b.size):
        b.after(received)
        b.send(b.inp[b.rank + t], b.rank + t)
        received = b.rred(b.out[0], b.rank - t)
