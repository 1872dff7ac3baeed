# SPDX-License-Identifier: Apache-2.0
"""Scatter-allgather (van de Geijn) and its mirror, both with direct messages.

*Broadcast*: the root sends block j to rank j; then every rank sends its block to all
that lack it. *Reduce*: every rank sends block j to rank j, which adds the P blocks;
then every rank sends its sum to the root.

Two steps, however many ranks. With more steps and fewer messages each, `ring` and
`halving_doubling` do the same: they scatter down a binomial tree, then go round the
ring, or double; or they reduce-scatter so, then gather.

Cost on one port: 2(P-1) alpha + 2(P-1)/P N beta, reduce also (P-1)/P N gamma, which is
the P-th part of what the root of `direct` adds. Bandwidth-optimal within a factor of 2.

Barnett, Shuler, Gupta, Payne, van de Geijn and Watts, "Building a high-performance
collective communication library", Supercomputing '94; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 19 (2005),
sections 4.2 and 4.4.
"""

from __future__ import annotations

from commrt.algorithms._registry import algorithm
from commrt.algorithms.direct import peers, reduce_own_block
from commrt.schedule.builder import Builder


@algorithm("bcast", "scatter_allgather", complexity=100, bandwidth=True)
def bcast(b: Builder) -> None:
    """The root sends everyone a block, everyone sends its block to everyone."""
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
        for peer in peers(b):
            b.send(b.out[peer], peer)
    else:
        b.recv(b.out[b.rank], b.root)
    for peer in peers(b):
        if peer != b.root:
            b.send(b.out[b.rank], peer)
    if b.rank != b.root:
        for peer in peers(b):
            b.recv(b.out[peer], peer)


@algorithm("reduce", "reduce_scatter_gather", complexity=110, bandwidth=True)
def reduce(b: Builder) -> None:
    """Everyone sends block j to rank j, which sends the sum to the root."""
    if b.rank == b.root:
        reduce_own_block(b, b.inp, b.out[b.rank])
        for peer in peers(b):
            b.recv(b.out[peer], peer)
        return
    sums = b.tmp(b.size)
    reduce_own_block(b, b.inp, sums[b.rank])
    b.send(sums[b.rank], b.root)
