# SPDX-License-Identifier: Apache-2.0
"""Ring: every rank talks only to its two neighbours; bandwidth-optimal, P-1 steps a
lap.

*Reduce-scatter lap.* The vector is cut into P blocks. In step t, rank r sends its
partial sum of block r-1-t to the next rank and receives that of block r-2-t from the
previous one, adding its own contribution. After P-1 steps rank r has the full sum of
block r.
*Allgather lap.* In step t, rank r passes block r-t on and receives block r-1-t.

Cost with alpha per message, beta per byte, gamma per reduced byte and N bytes in all: a
lap takes (P-1) alpha + (P-1)/P N beta, and the first also (P-1)/P N gamma; an allreduce
is both laps. No algorithm moves fewer bytes. Broadcast scatters the root's vector down
a binomial tree, then runs the allgather lap (van de Geijn); reduce runs the first lap,
then every rank sends its block to the root.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 69 (2009), section 3; Thakur, Rabenseifner and Gropp, "Optimization
of collective communication operations in MPICH", IJHPCA 19 (2005), sections 4.1 and
4.2.
"""

from __future__ import annotations

from commrt.algorithms._registry import algorithm
from commrt.algorithms.binomial import scatter_blocks
from commrt.schedule.builder import Buffer, Builder


def reduce_scatter_lap(b: Builder, buf: Buffer) -> None:
    """Leave the sum over all ranks of block r of ``buf`` in block r of rank r."""
    for t in range(b.size - 1):
        b.send(buf[b.rank - 1 - t], b.rank + 1)
        b.rred(buf[b.rank - 2 - t], b.rank - 1)


def allgather_lap(b: Builder, buf: Buffer, *, from_first: bool = False) -> None:
    """Give every rank block r of ``buf`` from each rank r.

    With ``from_first``, rank 0 has all blocks already and receives none.
    """
    for t in range(b.size - 1):
        if not (from_first and b.rank == b.size - 1):
            b.send(buf[b.rank - t], b.rank + 1)
        if not (from_first and b.rank == 0):
            b.recv(buf[b.rank - 1 - t], b.rank - 1)


@algorithm("allreduce", "ring", complexity=60, bandwidth=True)
def allreduce(b: Builder) -> None:
    """Reduce-scatter lap, then allgather lap."""
    b.copy(b.out[:], b.inp[:])
    reduce_scatter_lap(b, b.out)
    allgather_lap(b, b.out)


@algorithm("reduce_scatter", "ring", complexity=60, bandwidth=True)
def reduce_scatter(b: Builder) -> None:
    """One lap of partial sums."""
    sums = b.tmp(b.size)
    b.copy(sums[:], b.inp[:])
    reduce_scatter_lap(b, sums)
    b.copy(b.out[0], sums[b.rank])


@algorithm("allgather", "ring", complexity=60, bandwidth=True)
def allgather(b: Builder) -> None:
    """One lap of blocks."""
    b.copy(b.out[b.rank], b.inp[0])
    allgather_lap(b, b.out)


@algorithm("reduce", "ring", complexity=60, bandwidth=True)
def reduce(b: Builder) -> None:
    """Reduce-scatter lap, then every rank sends its block to the root."""
    sums = b.tmp(b.size)
    b.copy(sums[:], b.inp[:])
    reduce_scatter_lap(b, sums)
    if b.rank != b.root:
        b.send(sums[b.rank], b.root)
        return
    b.copy(b.out[b.rank], sums[b.rank])
    for t in range(1, b.size):
        b.recv(b.out[b.rank - t], b.rank - t)


@algorithm("bcast", "ring", complexity=60, bandwidth=True)
def bcast(b: Builder) -> None:
    """Scatter down a binomial tree, then allgather lap."""
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
    # Block v belongs to the v-th rank after the root, so that subtrees are ranges.
    tree = b.sub((*range(b.root, b.size), *range(b.root)))
    scatter_blocks(tree, b.out)
    allgather_lap(tree, b.out, from_first=True)
