# SPDX-License-Identifier: Apache-2.0
"""Pipelined trees: every rank passes each part of the vector on as soon as it has it.

*chain*: ranks stand in a line, counted from the root. *binary_tree*: rank v (from the
root) has the children 2v+1 and 2v+2. *Broadcast* goes down, *reduce* comes up, adding
the children's sums; *allreduce* reduces to rank 0 and broadcasts from there, and each
part turns round as soon as rank 0 has its sum. *Scan* and *exscan* go down the chain:
rank r adds its own part to the sum of those before it and sends that on.

The vector is cut into m = 8 parts; further parts follow while the first is on its way.
The executor cuts long vectors into fragments besides, which follow one another
likewise: the parts are for vectors of medium length. On up to four ranks a binary tree
is no shallower than `binomial`, and on two an allreduce is one exchange: there these do
not exist (a call that names them raises UsageError).

Cost of a broadcast: chain (P-1 + m-1) (alpha + N/m beta), binary tree
2 (log2 P + m-1) (alpha + N/m beta); reduce also adds as many N/m gamma; allreduce is
both, overlapped; a scan costs what a reduce does. For long vectors the chain moves N,
the binary tree 2 N: it is the better one where ranks are many and vectors not that
long.

Pjesivac-Grbovic, Angskun, Bosilca, Fagg, Gabriel and Dongarra, "Performance analysis of
MPI collective operations", Cluster Computing 10 (2007): chain and binary trees with
segments; Sanders and Traff, "Parallel prefix (scan) algorithms for MPI", EuroPVM/MPI
2006: the linear pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Buffer, Builder

_PARTS = 8
TOP = -1
"""The parent of a tree's top."""


class Links(NamedTuple):
    """Whom a rank of a tree talks to; the parent of its top is ``TOP``."""

    parent: int
    children: tuple[int, ...]


Tree = Callable[[int, int], Links]
"""The links of a rank among so many."""


def chain(rank: int, size: int) -> Links:
    """One after the other."""
    return Links(rank - 1, (rank + 1,) if rank + 1 < size else ())


def binary_tree(rank: int, size: int) -> Links:
    """Two children each, level by level."""
    children = (2 * rank + 1, 2 * rank + 2)
    return Links((rank - 1) // 2, tuple(one for one in children if one < size))


def _cut(b: Builder) -> None:
    """Cut the vector into parts; on two ranks nobody passes anything on."""
    b.blocks(_PARTS if b.size > 2 else 1)


def _from_root(b: Builder) -> Builder:
    return b.sub((*range(b.root, b.size), *range(b.root)))


def down(ranks: Builder, own: Links, part: int) -> None:
    """Receive one part from the parent, pass it on to the children."""
    if own.parent != TOP:
        ranks.recv(ranks.out[part], own.parent)
    for child in own.children:
        ranks.send(ranks.out[part], child)


def up(ranks: Builder, own: Links, sums: Buffer, part: int) -> None:
    """Add what the children send of one part, send the sum to the parent."""
    ranks.copy(sums[part], ranks.inp[part])
    for child in own.children:
        ranks.rred(sums[part], child)
    if own.parent != TOP:
        ranks.send(sums[part], own.parent)


def _register(name: str, tree: Tree, above: int, complexity: int) -> None:
    """Register a tree's operations for more than so many ranks."""
    register = partial(algorithm, name=name, complexity=complexity, bandwidth=True)

    @register("bcast", supports=lambda size: size > above)
    def bcast(b: Builder) -> None:
        """Receive each part from the parent, pass it on to the children."""
        _cut(b)
        if b.rank == b.root:
            b.copy(b.out[:], b.inp[:])
        ranks = _from_root(b)
        for part in range(b.nblk):
            down(ranks, tree(ranks.rank, b.size), part)

    @register("reduce", supports=lambda size: size > above)
    def reduce(b: Builder) -> None:
        """Add what the children send of each part, send it on to the parent."""
        _cut(b)
        sums = b.out if b.rank == b.root else b.tmp(b.nblk)
        ranks = _from_root(b)
        for part in range(b.nblk):
            up(ranks, tree(ranks.rank, b.size), sums, part)

    @register("allreduce", supports=lambda size: size > max(above, 2))
    def allreduce(b: Builder) -> None:
        """Reduce each part to rank 0, which sends it back down the tree."""
        _cut(b)
        own = tree(b.rank, b.size)
        for part in range(b.nblk):
            up(b, own, b.out, part)
            if b.rank == 0:
                down(b, own, part)
        for part in range(b.nblk if b.rank else 0):
            down(b, own, part)


_register("chain", chain, 0, 120)
_register("binary_tree", binary_tree, 4, 130)


@algorithm("scan", "chain", complexity=120, bandwidth=True, ordered=True)
def scan(b: Builder) -> None:
    """Add each part to the sum that the rank before sends; send that on."""
    _cut(b)
    for part in range(b.nblk):
        if b.rank:
            b.rred(b.out[part], b.rank - 1, src=b.inp[part])
        else:
            b.copy(b.out[part], b.inp[part])
        if b.rank + 1 < b.size:
            b.send(b.out[part], b.rank + 1)


@algorithm("exscan", "chain", complexity=120, bandwidth=True, ordered=True)
def exscan(b: Builder) -> None:
    """The same; what the rank before sends is the result, what goes on is more."""
    _cut(b)
    below, upto = b.tmp(b.nblk), b.tmp(b.nblk)
    for part in range(b.nblk):
        known = b.inp[part]
        if b.rank:
            b.recv(below[part], b.rank - 1)
            b.copy(upto[part], below[part])
            b.reduce(upto[part], known)
            known = upto[part]
        if b.rank + 1 < b.size:
            b.send(known, b.rank + 1)
        if b.rank:
            b.copy(b.out[part], below[part])
