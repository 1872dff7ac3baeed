# SPDX-License-Identifier: Apache-2.0
"""Double tree: two binary trees at once, and who has children in one is a leaf in the
other.

In a single binary tree half of the ranks, the leaves, only receive (or only send), and
those with two children send everything twice. Here the first tree carries the even
parts of the vector and the second one the odd parts, so that every rank sends about as
much as it receives: N, which is all that its link can carry. The first tree has its
ranks in order: rank v with lowest set bit i stands above v - 2^(i-1) and v + 2^(i-1),
so that all odd ranks are leaves. The second one is the first one mirrored (v becomes
P-1-v) for even numbers of ranks, and moved on by one place for odd ones.

*Broadcast*: the root stands apart; the trees span the other ranks, and it sends the
parts to the tops of the two in turn. *Reduce* is the mirror image. *Allreduce*: the
trees span all ranks; each part goes up its tree and, as soon as the top has its sum,
down again.

The vector is cut into 8 parts, 4 for each tree, which follow one another; the executor
cuts long vectors into fragments besides. On up to four ranks there are shallower trees:
there it does not exist (a call that names it raises UsageError).

Cost of a broadcast: (2 log2 P + m) (alpha + N/m beta) for m parts, which is N beta for
long vectors where a single binary tree takes 2 N beta; reduce also adds N gamma;
allreduce is both, overlapped.

Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan", Parallel Computing 35 (2009); Jeaugey, "Massively scale your deep learning
training with NCCL 2.4" (2019), for both trees over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from commrt.algorithms._registry import algorithm
from commrt.algorithms.pipelined_trees import TOP, Links, down, up
from commrt.schedule.builder import Builder
from commrt.schedule.ir import ParamValue

_PARTS = 8
_ABOVE = 4
_FEW = 8


def _in_order(rank: int, size: int) -> Links:
    """Return the links in the tree that has its ranks in order; rank 0 is its top."""
    bit = rank & -rank if rank else 1 << (size - 1).bit_length()
    parent = TOP
    if rank:
        parent = (rank ^ bit) | (bit << 1)
        if parent >= size:
            parent = rank ^ bit
    children = []
    if rank and bit > 1:
        children.append(rank - bit // 2)
    reach = bit // 2
    while reach and rank + reach >= size:
        reach //= 2
    if reach:
        children.append(rank + reach)
    return Links(parent, tuple(children))


@lru_cache(maxsize=4096)
def tree(number: int, rank: int, size: int) -> Links:
    """Return the links of a rank in the first (0) or second (1) tree; -1: no parent."""
    if number == 0:
        return _in_order(rank, size)
    if size % 2:
        found = _in_order((rank - 1) % size, size)
        places = [(one + 1) % size for one in found.children]
        parent = TOP if found.parent == TOP else (found.parent + 1) % size
        return Links(parent, tuple(places))
    found = _in_order(size - 1 - rank, size)
    places = [size - 1 - one for one in found.children]
    parent = TOP if found.parent == TOP else size - 1 - found.parent
    return Links(parent, tuple(places))


def top(number: int, size: int) -> int:
    """Return the rank without a parent."""
    if number == 0:
        return 0
    return 1 % size if size % 2 else size - 1


def _rooted(b: Builder) -> tuple[Builder, list[Links]]:
    """Return the ranks counted from the root, and this rank's links in both trees.

    The root, rank 0, is the parent of the tops of two trees of all others.
    """
    ranks = b.sub((*range(b.root, b.size), *range(b.root)))
    others = b.size - 1
    if ranks.rank == 0:
        return ranks, [Links(TOP, (1 + top(number, others),)) for number in range(2)]
    links = []
    for number in range(2):
        own = tree(number, ranks.rank - 1, others)
        links.append(Links(own.parent + 1, tuple(one + 1 for one in own.children)))
    return ranks, links


def _exists(size: int) -> bool:
    return size > _ABOVE


def _is_offered(size: int, params: Mapping[str, ParamValue]) -> bool:
    """Return whether it can win: among few ranks a chain moves as much, as soon."""
    return size > _FEW


def _by_name_only(size: int, params: Mapping[str, ParamValue]) -> bool:
    """The model sees halving-doubling ahead at every length; NCCL's choice differs."""
    return False


def _split(links: Sequence[Links]) -> tuple[list[int], list[int]]:
    """Return the parts that this rank only sends or receives, and those it passes on.

    A rank that waited in turn for what it passes on in one tree and for what comes to
    it late in the other one would hold up both.
    """
    parts = range(_PARTS)
    ends = [part for part in parts if not links[part % 2].children]
    return ends, [part for part in parts if links[part % 2].children]


@algorithm(
    "bcast",
    "double_tree",
    complexity=140,
    supports=_exists,
    offered=_is_offered,
    bandwidth=True,
)
def bcast(b: Builder) -> None:
    """Receive each part from its tree's parent, pass it on to the children."""
    b.blocks(_PARTS)
    ranks, links = _rooted(b)
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
    ends, passed_on = _split(links)
    for part in (*passed_on, *ends):
        down(ranks, links[part % 2], part)


@algorithm(
    "reduce",
    "double_tree",
    complexity=140,
    supports=_exists,
    offered=_is_offered,
    bandwidth=True,
)
def reduce(b: Builder) -> None:
    """Add what the children in its tree send of each part, send it on to the parent."""
    b.blocks(_PARTS)
    ranks, links = _rooted(b)
    sums = b.out if b.rank == b.root else b.tmp(_PARTS)
    ends, passed_on = _split(links)
    for part in (*ends, *passed_on):
        up(ranks, links[part % 2], sums, part)


@algorithm(
    "allreduce",
    "double_tree",
    complexity=140,
    supports=_exists,
    offered=_by_name_only,
    bandwidth=True,
)
def allreduce(b: Builder) -> None:
    """Each part goes up its tree to the top, and down again."""
    b.blocks(_PARTS)
    links = [tree(number, b.rank, b.size) for number in range(2)]
    ends, passed_on = _split(links)
    for part in (*ends, *passed_on):
        own = links[part % 2]
        up(b, own, b.out, part)
        if own.parent == TOP:
            down(b, own, part)
    for part in (*passed_on, *ends):
        own = links[part % 2]
        if own.parent != TOP:
            down(b, own, part)
