# SPDX-License-Identifier: Apache-2.0
"""Binomial tree: the data doubles (or halves) its ranks in each of ceil(log2 P) steps.

Ranks are counted from the root: v = (rank - root) mod P. The parent of v clears its
lowest set bit; the children of v are v + 2^i for every 2^i below that bit (every power
of two below P for the root). *Broadcast*: receive from the parent, send to the
children, the largest subtree first. *Reduce*: receive and add from the children, the
smallest subtree first, send to the parent. *Scatter* and *gather*: the same, but a
message carries only the blocks of the subtree, which is the range [v, v + 2^i).

Cost: broadcast and reduce ceil(log2 P) (alpha + N beta), reduce also ceil(log2 P) N
gamma; scatter and gather ceil(log2 P) alpha + (P-1)/P N beta. Latency-optimal; for
scatter and gather also bandwidth-optimal.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.1 and 4.5.
"""

from __future__ import annotations

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Buffer, Builder


def _from_root(b: Builder) -> Builder:
    """Return the same ranks, counted from the root."""
    return b.sub((*range(b.root, b.size), *range(b.root)))


def _reach(tree: Builder) -> int:
    """Return the size that this rank's subtree would have with enough ranks."""
    if tree.rank:
        return tree.rank & -tree.rank
    return 1 << (tree.size - 1).bit_length()


def _children(tree: Builder) -> list[int]:
    """Return the children, the smallest subtree first."""
    bits = _reach(tree).bit_length() - 1
    all_children = (tree.rank + (1 << i) for i in range(bits))
    return [child for child in all_children if child < tree.size]


def _parent(tree: Builder) -> int:
    return tree.rank & (tree.rank - 1)


def scatter_blocks(tree: Builder, buf: Buffer) -> None:
    """Give rank v of ``tree`` its subtree's blocks [v, …) of rank 0's ``buf``."""
    end = min(tree.rank + _reach(tree), tree.size)
    if tree.rank:
        tree.recv(buf[tree.rank : end], _parent(tree))
    for child in reversed(_children(tree)):
        tree.send(buf[child:end], child)
        end = child


def gather_blocks(tree: Builder, buf: Buffer) -> None:
    """Give rank 0 of ``tree`` block v of ``buf`` from each rank v."""
    for child in _children(tree):
        end = min(2 * child - tree.rank, tree.size)
        tree.recv(buf[child:end], child)
    if tree.rank:
        end = min(tree.rank + _reach(tree), tree.size)
        tree.send(buf[tree.rank : end], _parent(tree))


@algorithm("bcast", "binomial", complexity=30, latency=True)
def bcast(b: Builder) -> None:
    """Receive from the parent, send to the children."""
    b.blocks(1)
    tree = _from_root(b)
    if tree.rank == 0:
        b.copy(b.out[:], b.inp[:])
    else:
        tree.recv(b.out[:], _parent(tree))
    for child in reversed(_children(tree)):
        tree.send(b.out[:], child)


@algorithm("reduce", "binomial", complexity=30, latency=True)
def reduce(b: Builder) -> None:
    """Add what the children send, send the sum to the parent."""
    b.blocks(1)
    tree = _from_root(b)
    total = b.out if tree.rank == 0 else b.tmp(1)
    b.copy(total[:], b.inp[:])
    for child in _children(tree):
        tree.rred(total[:], child)
    if tree.rank:
        tree.send(total[:], _parent(tree))


@algorithm("gather", "binomial", complexity=30, latency=True, bandwidth=True)
def gather(b: Builder) -> None:
    """Collect the blocks of the subtree, send them to the parent."""
    tree = _from_root(b)
    blocks = b.tmp(b.size)
    b.copy(blocks[tree.rank], b.inp[0])
    gather_blocks(tree, blocks)
    if tree.rank == 0:
        for v in range(b.size):
            b.copy(b.out[b.root + v], blocks[v])


@algorithm("scatter", "binomial", complexity=30, latency=True, bandwidth=True)
def scatter(b: Builder) -> None:
    """Receive the blocks of the subtree, send each child its share."""
    tree = _from_root(b)
    blocks = b.tmp(b.size)
    if tree.rank == 0:
        for v in range(b.size):
            b.copy(blocks[v], b.inp[b.root + v])
    scatter_blocks(tree, blocks)
    b.copy(b.out[0], blocks[tree.rank])
