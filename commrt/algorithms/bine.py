# SPDX-License-Identifier: Apache-2.0
"""Bine (binomial negabinary): binomial trees and butterflies between nearer ranks.

Ranks lie on a ring. Where partners of a binomial tree are 1, 2, 4, 8, ... apart, those
of a Bine tree are 1, 1, 3, 5, 11, ..., a third less. So fewer bytes cross from one
group of neighbouring ranks to another, such as the hosts of a switch, and nobody has to
know the groups.

*Tree.* The ranks below a rank are neighbours on the ring, with the rank in their
middle, not at their end. The tree of height t + 1 is one of height t, and another one
beside it on the one side or the other in turn; the roots of the two are |d(t)| apart,
where d(t) = 1 - 2 + 4 - ... (t + 1 terms). That many ranks as the negabinary numbers of
t + 1 digits. For P that is no power of two the outermost ranks are left out, and the
nearest rank that is there stands in for a root that is not. *Broadcast* (form=tree) and
*scatter* go down, the farthest and largest subtree first; *reduce* (form=tree) and
*gather* come up. Scatter and gather send the blocks of a subtree.

*Butterfly.* In step t rank r exchanges with the rank d(t) away, even ones to the one
side and odd ones to the other. *Reduce_scatter* halves with the nearest rank first,
while pieces are large; *allgather* doubles with the nearest rank last. *Alltoall*
exchanges half of all blocks in each step, as `dissemination` does. *Allreduce* is the
first two, one after the other (form=halving), or exchanges whole vectors (form=whole):
the same messages as those of `swing` on a ring. *Broadcast*, form=scatter, scatters
down the butterfly and doubles back; *reduce*, form=halving, is its mirror image.

Ranks beyond a power of two fold in butterflies (see recursive_doubling): a pair's sums
are made by its even rank.

Cost: that of `binomial`, `halving_doubling` and `recursive_doubling`; alltoall
log2 P (alpha + N/2 beta). Between groups of neighbours go fewer bytes: 0.74 to 0.82 of
those of binomial broadcasts, 0.14 to 0.37 of those of butterflies that send most to
the farthest rank (16 to 128 ranks in groups of 4 to 16, all roots). Allreduce and
reduce, form=halving, send 0.82 to 1.1 of the bytes of `halving_doubling` where groups
are uneven, but up to 2.3 of them where groups are powers of two, so only who names them
gets these, and alltoall.

De Sensi, Pasqualoni, Piarulli, Bonato, Ba, Turisini, Domke and Hoefler, "Bine Trees:
Enhancing Collective Operations by Optimizing Communication Locality", SC 2025: trees
with halving distance, butterflies with doubling distance. The partners are those of the
authors' public code; the paper itself was not read in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

from commrt.algorithms._fold import Fold
from commrt.algorithms._registry import algorithm
from commrt.algorithms.swing import Swing, exchange_all, halve, swing
from commrt.schedule.builder import Builder
from commrt.schedule.ir import ParamValue

TOP = -1
"""The parent of a tree's root."""


class Node(NamedTuple):
    """A place of the tree; those below it are ``[first, stop)``, and its own."""

    parent: int
    first: int
    stop: int
    children: tuple[int, ...]
    """The largest subtree first."""


class Tree(NamedTuple):
    """A tree over places 0, 1, ... that follow one another on the ring."""

    root: int
    """Place of the root."""
    nodes: tuple[Node, ...]


def distance(step: int) -> int:
    """Return 1, 1, 3, 5, 11, ...: how far partners of a step are apart."""
    total: int = sum((-2) ** term for term in range(step + 1))
    return abs(total)


@lru_cache(maxsize=256)
def tree(size: int) -> Tree:
    """Return the tree of so many ranks; kept, because all ranks ask."""
    height = (size - 1).bit_length()
    root = sum(2**term for term in range(1, height, 2))
    # The last half that joined is cut at its outer end: low if that is the lower one.
    low = (1 << height) - size if height % 2 == 0 else 0
    nodes: dict[int, Node] = {}
    _grow(nodes, TOP, root, range(low, low + size), height, 0)
    return Tree(root - low, tuple(_moved(nodes[low + at], low) for at in range(size)))


def _moved(node: Node, low: int) -> Node:
    parent = node.parent if node.parent == TOP else node.parent - low
    children = tuple(child - low for child in node.children)
    return Node(parent, node.first - low, node.stop - low, children)


def _grow(
    nodes: dict[int, Node], parent: int, own: int, below: range, height: int, start: int
) -> None:
    """Add the subtree of place ``own``.

    Args:
        nodes: what is known.
        parent: its parent.
        own: the place.
        below: the places that it has.
        height: it would have 2^height of them if none were left out.
        start: the first of those.
    """
    children: list[int] = []
    kept = below
    for step in reversed(range(height)):
        middle = start + (1 << step)
        halves = _between(kept, start, middle), _between(kept, middle, kept.stop)
        upper = own >= middle
        kept, given = halves[upper], halves[not upper]
        far = own - distance(step) if upper else own + distance(step)
        if given:
            child = min(max(far, given.start), given.stop - 1)
            children.append(child)
            _grow(nodes, own, child, given, step, start if upper else middle)
        start = middle if upper else start
    nodes[own] = Node(parent, below.start, below.stop, tuple(children))


def _between(places: range, first: int, stop: int) -> range:
    return range(max(first, places.start), min(stop, places.stop))


def _in_tree(b: Builder) -> tuple[Builder, Node]:
    """Return the ranks in the order of the tree's places, and this rank's node."""
    places = b.sub(_ranks(b))
    return places, tree(b.size).nodes[places.rank]


def _ranks(b: Builder) -> list[int]:
    """Return the rank at each place of the tree."""
    first = b.root - tree(b.size).root
    return [(first + place) % b.size for place in range(b.size)]


def _by_name_only(size: int, params: Mapping[str, ParamValue]) -> bool:
    """Partners of `halving_doubling` that are near first cross less where groups are
    even; `dissemination` takes an alltoall's blocks on fewer ways."""
    return False


def _is_tree_offered(size: int, params: Mapping[str, ParamValue]) -> bool:
    """Return whether it is the tree: see above."""
    return params["form"] == "tree"


# Trees


def _is_tree(b: Builder) -> bool:
    return bool(b.params["form"] == "tree")


@algorithm(
    "bcast",
    "bine",
    complexity=180,
    params={"form": ("tree", "scatter")},
    latency=True,
    bandwidth=True,
)
def bcast(b: Builder) -> None:
    """Down the tree; or scatter down the butterfly and double back."""
    if _is_tree(b):
        b.blocks(1)
        places, own = _in_tree(b)
        if own.parent == TOP:
            b.copy(b.out[:], b.inp[:])
        else:
            places.recv(b.out[:], own.parent)
        for child in own.children:
            places.send(b.out[:], child)
        return
    ranks = _from_root(b)
    fold = Fold(ranks)
    b.blocks(fold.num)
    if fold.folded:
        ranks.recv(b.out[:], ranks.rank - 1)
        return
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
    group = fold.group()
    spread = _spread(fold.num, group.rank)
    for one in spread:
        if one.receives:
            group.recv(b.out[one.mine], one.peer)
        elif one.has:
            group.send(b.out[one.theirs], one.peer)
    for one in reversed(spread):
        if not (one.receives or one.has):
            group.send(b.out[one.mine], one.peer)
            group.recv(b.out[one.theirs], one.peer)
        elif one.receives:
            group.recv(b.out[one.theirs], one.peer)
        else:
            group.send(b.out[one.mine], one.peer)
    if fold.folds:
        ranks.send(b.out[:], ranks.rank + 1)


def _from_root(b: Builder) -> Builder:
    return b.sub((*range(b.root, b.size), *range(b.root)))


class Spread(NamedTuple):
    """One step of a butterfly in which blocks spread from rank 0."""

    peer: int
    mine: slice
    """Blocks that the rank has after the step, if it has any."""
    theirs: slice
    """Blocks that its partner has."""
    receives: bool
    """True if they come to it in this step."""
    has: bool
    """True if it had blocks before."""


@lru_cache(maxsize=1024)
def _spread(num: int, rank: int) -> list[Spread]:
    """Return the steps of a rank; kept, because calls come again."""
    pattern = swing((num,), 0)
    have = {0}
    found: list[Spread] = []
    for step in range(pattern.steps):
        peer, width = pattern.peer(rank, step), num >> step + 1
        places = (pattern.place(one) // width * width for one in (rank, peer))
        mine, theirs = (slice(place, place + width) for place in places)
        has = rank in have
        found.append(Spread(peer, mine, theirs, not has and peer in have, has))
        have |= {pattern.peer(one, step) for one in have}
    return found


@algorithm(
    "reduce",
    "bine",
    complexity=180,
    params={"form": ("tree", "halving")},
    offered=_is_tree_offered,
    latency=True,
    bandwidth=True,
)
def reduce(b: Builder) -> None:
    """Up the tree; or halve, then gather up the butterfly."""
    if _is_tree(b):
        b.blocks(1)
        places, own = _in_tree(b)
        total = b.out if own.parent == TOP else b.tmp(1)
        b.copy(total[:], b.inp[:])
        for child in reversed(own.children):
            places.rred(total[:], child)
        if own.parent != TOP:
            places.send(total[:], own.parent)
        return
    ranks = _from_root(b)
    fold = Fold(ranks)
    b.blocks(fold.num)
    if fold.folded:
        ranks.send(b.inp[:], ranks.rank - 1)
        return
    sums = b.out if b.rank == b.root else b.tmp(b.nblk)
    b.copy(sums[:], b.inp[:])
    if fold.folds:
        ranks.rred(sums[:], ranks.rank + 1)
    group = fold.group()
    halve(group, swing((fold.num,), 0), sums)
    for one in reversed(_spread(fold.num, group.rank)):
        if one.receives:
            group.send(sums[one.mine], one.peer)
        elif one.has:
            group.recv(sums[one.theirs], one.peer)


@algorithm("gather", "bine", complexity=180, latency=True, bandwidth=True)
def gather(b: Builder) -> None:
    """Collect the blocks of the subtree, send them to the parent."""
    places, own = _in_tree(b)
    blocks = b.tmp(b.size)
    b.copy(blocks[places.rank], b.inp[0])
    for child in reversed(own.children):
        places.recv(blocks[_below(b.size, child)], child)
    if own.parent != TOP:
        places.send(blocks[own.first : own.stop], own.parent)
        return
    for at, rank in enumerate(_ranks(b)):
        b.copy(b.out[rank], blocks[at])


def _below(size: int, place: int) -> slice:
    one = tree(size).nodes[place]
    return slice(one.first, one.stop)


@algorithm("scatter", "bine", complexity=180, latency=True, bandwidth=True)
def scatter(b: Builder) -> None:
    """Receive the blocks of the subtree, send each child its share."""
    places, own = _in_tree(b)
    blocks = b.tmp(b.size)
    if own.parent == TOP:
        for at, rank in enumerate(_ranks(b)):
            b.copy(blocks[at], b.inp[rank])
    else:
        places.recv(blocks[own.first : own.stop], own.parent)
    for child in own.children:
        places.send(blocks[_below(b.size, child)], child)
    b.copy(b.out[0], blocks[places.rank])


# Butterflies


@algorithm(
    "allreduce",
    "bine",
    complexity=180,
    params={"form": ("halving", "whole")},
    offered=_by_name_only,
    latency=True,
    bandwidth=True,
)
def allreduce(b: Builder) -> None:
    """Halve with the nearest rank first, then double backwards; or whole vectors."""
    num = 1 << (b.size.bit_length() - 1)
    exchange_all(b, (num,), 1, halving=b.params["form"] == "halving")


class _Order:
    """The ranks' blocks in the order in which a butterfly of participants halves them.

    Attributes:
        pattern: the partners.
    """

    def __init__(self, b: Builder) -> None:
        fold = Fold(b)
        self.pattern = swing((fold.num,), 0)
        self._acted_for = _by_place(fold, self.pattern)
        self._starts = (0, *accumulate(map(len, self._acted_for)))

    @property
    def ranks(self) -> Iterator[int]:
        """The rank of each block."""
        return (rank for ranks in self._acted_for for rank in ranks)

    def blocks(self, lo: int, hi: int) -> slice:
        """Return the blocks at the places ``[lo, hi)``."""
        return slice(self._starts[lo], self._starts[hi])

    def peers(self, participant: int) -> list[int]:
        """Return the partner of each step."""
        return [self.pattern.peer(participant, s) for s in range(self.pattern.steps)]

    def kept(self, participant: int, steps: int) -> tuple[int, int]:
        """Return the places that a participant works on after some steps."""
        width = self.pattern.size >> steps
        first = self.pattern.place(participant) // width * width
        return first, first + width

    def pairs(self, giver: int, taker: int, step: int) -> list[tuple[int, int]]:
        """Return source and destination of the blocks that change hands in a step."""
        lo, hi = self.kept(taker, step + 1)
        destinations = [rank for ranks in self._acted_for[lo:hi] for rank in ranks]
        givers = [self.pattern.place(one) for one in self._heard(giver, step)]
        sources = [rank for place in givers for rank in self._acted_for[place]]
        return list(product(sources, destinations))

    def _heard(self, participant: int, steps: int) -> list[int]:
        """Return the participants whose blocks one has after some steps."""
        found = [participant]
        for step in reversed(range(steps)):
            found += [self.pattern.peer(one, step) for one in found]
        return found


def _by_place(fold: Fold, pattern: Swing) -> list[Sequence[int]]:
    """Return the ranks that the participant at each place acts for."""
    found: list[Sequence[int]] = [()] * fold.num
    for participant in range(fold.num):
        own = fold.blocks(participant, participant + 1)
        found[pattern.place(participant)] = range(own.start, own.stop)
    return found


@algorithm(
    "reduce_scatter",
    "bine",
    complexity=180,
    own_places=True,
    latency=True,
    bandwidth=True,
)
def reduce_scatter(b: Builder) -> None:
    """Halve with the nearest rank first."""
    fold, order = Fold(b), _Order(b)
    if fold.folded:
        b.send(b.inp[:], b.rank - 1)
        b.recv(b.out[0], b.rank - 1)
        return
    sums = b.tmp(b.size)
    if fold.folds:
        arrived = b.tmp(b.size)
        b.rred(arrived[:], b.rank + 1, src=b.inp[:])
    else:
        arrived = b.inp
    for at, rank in enumerate(order.ranks):
        b.copy(sums[at], arrived[rank])
    group = fold.group()
    halve(group, order.pattern, sums, order.blocks)
    place = order.pattern.place(group.rank)
    mine = order.blocks(place, place + 1)
    b.copy(b.out[0], sums[mine.start])
    if fold.folds:
        b.send(sums[mine.start + 1], b.rank + 1)


@algorithm(
    "allgather",
    "bine",
    complexity=180,
    own_places=True,
    latency=True,
    bandwidth=True,
)
def allgather(b: Builder) -> None:
    """Double with the nearest rank last."""
    fold, order = Fold(b), _Order(b)
    if fold.folded:
        b.send(b.inp[0], b.rank - 1)
        b.recv(b.out[:], b.rank - 1)
        return
    known = b.tmp(b.size)
    group, pattern = fold.group(), order.pattern
    place = pattern.place(group.rank)
    mine = order.blocks(place, place + 1)
    b.copy(known[mine.start], b.inp[0])
    if fold.folds:
        b.recv(known[mine.start + 1], b.rank + 1)
    for step in reversed(range(pattern.steps)):
        peer = pattern.peer(group.rank, step)
        group.send(known[_half(order, group.rank, step)], peer)
        group.recv(known[_half(order, peer, step)], peer)
    for at, rank in enumerate(order.ranks):
        b.copy(b.out[rank], known[at])
    if fold.folds:
        b.send(b.out[:], b.rank + 1)


def _half(order: _Order, participant: int, step: int) -> slice:
    """Return the blocks that a participant keeps in a step of the halving."""
    return order.blocks(*order.kept(participant, step + 1))


@algorithm(
    "alltoall",
    "bine",
    complexity=180,
    own_places=True,
    offered=_by_name_only,
    latency=True,
)
def alltoall(b: Builder) -> None:
    """Hand half of all blocks, those for the ranks on its side, to the partner."""
    fold, order = Fold(b), _Order(b)
    if fold.folded:
        b.send(b.inp[:], b.rank - 1)
        came = b.tmp(b.size)
        b.recv(came[:], b.rank - 1)
        b.copy(b.out[:], came[:])
        return
    where = {(b.rank, to): b.inp[to] for to in range(b.size)}
    if fold.folds:
        other = b.tmp(b.size)
        b.recv(other[:], b.rank + 1)
        where.update({(b.rank + 1, to): other[to] for to in range(b.size)})
    group = fold.group()
    for step, peer in enumerate(order.peers(group.rank)):
        leaving = order.pairs(group.rank, peer, step)
        packed = b.tmp(len(leaving))
        for at, pair in enumerate(leaving):
            b.copy(packed[at], where.pop(pair))
        group.send(packed[:], peer)
        coming = order.pairs(peer, group.rank, step)
        arrived = b.tmp(len(coming))
        group.recv(arrived[:], peer)
        where.update({pair: arrived[at] for at, pair in enumerate(coming)})
    if fold.folds:
        packed = b.tmp(b.size)
        for rank in range(b.size):
            b.copy(packed[rank], where[rank, b.rank + 1])
        b.send(packed[:], b.rank + 1)
    # Only now: in place, the output's blocks are the input's.
    for rank in range(b.size):
        b.copy(b.out[rank], where[rank, b.rank])
