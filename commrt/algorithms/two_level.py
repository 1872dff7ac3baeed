# SPDX-License-Identifier: Apache-2.0
"""Two-level: one algorithm inside the nodes and another one between them.

The vector is cut into *stripes*, one per leader: each node has one *leader* for each
stripe. The ranks of a node give their contributions to a stripe to its leader (on the
node). The leaders of one stripe run the operation among themselves (between nodes).
Then each gives its node the result (on the node). ``leaders=1`` sends one message
between nodes where a flat algorithm sends many; with ``leaders=all``, the multi-leader
form, every rank of the fullest node leads a stripe, so that all cores of a node send at
once. On a node with fewer ranks than stripes some ranks lead several. In an allgather a
stripe is made of the blocks of some ranks of each node, in an alltoall of those for
some ranks.

``inside`` names the algorithm on the nodes (of reduce, of bcast, or one that both
have), ``among`` that between them (of the operation itself); each with its default
parameters. Nodes may have any numbers of ranks, and these any order.

Cost: what ``inside`` costs on a node plus what ``among`` costs on as many ranks as
there are nodes, on N/stripes for each leader. Bytes between nodes are those of
``among``, once for a whole node; a flat algorithm sends up to k times as many, for k
ranks per node.

Karonis, de Supinski, Foster, Gropp, Lusk and Bresnahan, "Exploiting hierarchy in
parallel computer networks to optimize collective operation performance", IPDPS 2000;
Bayatpour, Chakraborty, Subramoni, Lu and Panda, "Scalable reduction collectives with
data partitioning-based multi-leader design", SC 2017, section 4;
Traff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication",
CLUSTER 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from commrt.algorithms._nested import common_names, cut, run
from commrt.algorithms._registry import algorithm, get
from commrt.algorithms._stripes import Stripe, all_stripes, consecutive
from commrt.schedule.builder import Buffer, Builder
from commrt.schedule.ir import ParamValue, Slice
from commrt.schedule.nodes import Nodes, members
from commrt.vocabulary.operations import operation

_ALL = "all"
_MANY_LEADERS = 128


class Levels:
    """The leaders of this rank's stripes.

    Attributes:
        nodes: the ranks of each node; node: the number of this rank's.
        stripes: how many stripes there are.
    """

    def __init__(self, b: Builder) -> None:
        self._b = b
        self.nodes = b.nodes
        self.node = next(i for i, own in enumerate(self.nodes) if b.rank in own)
        asked = b.params["leaders"]
        self.stripes = max(map(len, self.nodes)) if asked == _ALL else int(asked)
        # The root, if it takes one in, leads on its node.
        self._first = [0] * len(self.nodes)

    @property
    def own(self) -> Sequence[int]:
        """The ranks of this rank's node."""
        return self.nodes[self.node]

    def node_of(self, rank: int) -> int:
        """Return the number of the node of ``rank``."""
        return next(i for i, own in enumerate(self.nodes) if rank in own)

    def led_by(self, root: int) -> Levels:
        """Make ``root`` the first leader of its node."""
        node = self.node_of(root)
        self._first[node] = self.nodes[node].index(root)
        return self

    def leader(self, node: int, stripe: int) -> int:
        """Return the leader of a stripe on a node."""
        ranks = self.nodes[node]
        at = self._first[node] + stripe * len(ranks) // self.stripes
        return ranks[at % len(ranks)]

    def leaders(self, stripe: int) -> list[int]:
        """Return the leaders of a stripe, node by node."""
        return [self.leader(node, stripe) for node in range(len(self.nodes))]

    def place(self, rank: int) -> int:
        """Return the place of ``rank`` on this rank's node."""
        return self.own.index(rank)

    def led(self) -> Iterator[int]:
        """Yield the stripes that this rank leads."""
        for stripe in range(self.stripes):
            if self.leader(self.node, stripe) == self._b.rank:
                yield stripe

    def stripe(self, number: int) -> Stripe:
        """Return which blocks are in a stripe, for operations with a block per rank."""
        return all_stripes(self.nodes, self.stripes)[number]


# Parameter values that a caller may name


Offer = Callable[[int, Mapping[str, ParamValue]], bool]


def _leaders(nodes: Nodes | None) -> tuple[ParamValue, ...]:
    most = max(map(len, members(nodes))) if nodes else _MANY_LEADERS
    fewer = [1 << bit for bit in range(most.bit_length()) if 1 << bit < most]
    return (_ALL, *fewer)


def _first(preferred: str, found: list[str]) -> tuple[str, ...]:
    return (preferred, *(name for name in found if name != preferred))


def _choices(
    inside: tuple[str, ...], coll: str, among: str
) -> Callable[[Nodes | None], dict[str, tuple[ParamValue, ...]]]:
    """Return what names the algorithms that these nodes allow."""

    def choices(nodes: Nodes | None) -> dict[str, tuple[ParamValue, ...]]:
        sizes = list(map(len, members(nodes))) if nodes else []
        num = [len(sizes)] if nodes else []
        found: dict[str, tuple[ParamValue, ...]] = {"leaders": _leaders(nodes)}
        if inside:
            found["inside"] = _first("direct", common_names(inside, sizes))
        able = common_names([coll], num)
        if len(set(sizes)) > 1 and _has_block_per_rank(coll):
            able = [name for name in able if _takes_unequal_blocks(coll, name)]
        return {**found, "among": _first(among, able)}

    return choices


def _has_block_per_rank(coll: str) -> bool:
    spec = operation(coll)
    return spec.is_blocked and not spec.has_root


def _takes_unequal_blocks(coll: str, name: str) -> bool:
    """Return whether a node's blocks may be more than another one's.

    All that keep the blocks of a rank at its place can, and the tests prove it of those
    of this package.
    """
    one = get(coll, name)
    return one.built_in and not one.own_places


def _offered(*among: str) -> Offer:
    """Return what says which values are worth a try where nobody names them."""

    def offered(size: int, params: Mapping[str, ParamValue]) -> bool:
        return (
            params["leaders"] in (1, _ALL)
            and params.get("inside", "direct") == "direct"
            and params["among"] in among
        )

    return offered


# The operations on whole vectors


def _stripes(b: Builder, levels: Levels, parts: list[tuple[str, str, int]]) -> int:
    """Cut the vector into stripes of blocks; return the blocks of a stripe."""
    blocks = cut(parts)
    b.blocks(levels.stripes * blocks)
    return blocks


def _stripe(buffer: Buffer, stripe: int, blocks: int) -> Slice:
    return buffer[stripe * blocks : (stripe + 1) * blocks]


def _inside_sizes(levels: Levels) -> set[int]:
    return set(map(len, levels.nodes))


@algorithm(
    "allreduce",
    "two_level",
    complexity=160,
    params=_choices(("reduce", "bcast"), "allreduce", "recursive_doubling"),
    spans_nodes=True,
    offered=_offered("recursive_doubling", "halving_doubling", "ring", "direct"),
    latency=True,
    bandwidth=True,
)
def allreduce(b: Builder) -> None:
    """Reduce on the node, allreduce between nodes, broadcast on the node."""
    levels = Levels(b)
    inside, among = b.params["inside"], b.params["among"]
    parts = [("allreduce", among, len(levels.nodes))]
    for size in _inside_sizes(levels):
        parts += [("reduce", inside, size), ("bcast", inside, size)]
    blocks = _stripes(b, levels, parts)
    _reduce_inside(b, levels, blocks, b.out)
    for stripe in levels.led():
        mine = [_stripe(b.out, stripe, blocks)]
        run(b, "allreduce", among, levels.leaders(stripe), inp=mine, out=mine)
    _bcast_inside(b, levels, blocks)


def _reduce_inside(b: Builder, levels: Levels, blocks: int, sums: Buffer) -> None:
    """Give each leader of the node the sum of its stripe, in ``sums``."""
    for stripe in range(levels.stripes):
        leader = levels.leader(levels.node, stripe)
        run(
            b,
            "reduce",
            b.params["inside"],
            levels.own,
            inp=[_stripe(b.inp, stripe, blocks)],
            out=[_stripe(sums, stripe, blocks)] if leader == b.rank else [],
            root=levels.place(leader),
        )


def _bcast_inside(b: Builder, levels: Levels, blocks: int) -> None:
    """Give every rank of the node what each leader has in its stripe of ``out``."""
    for stripe in range(levels.stripes):
        leader = levels.leader(levels.node, stripe)
        where = [_stripe(b.out, stripe, blocks)]
        run(
            b,
            "bcast",
            b.params["inside"],
            levels.own,
            inp=where if leader == b.rank else [],
            out=where,
            root=levels.place(leader),
        )


@algorithm(
    "reduce",
    "two_level",
    complexity=160,
    params=_choices(("reduce",), "reduce", "binomial"),
    spans_nodes=True,
    offered=_offered(
        *("bine", "halving_doubling", "chain", "direct", "reduce_scatter_gather")
    ),
    latency=True,
    bandwidth=True,
)
def reduce(b: Builder) -> None:
    """Reduce on the node, between nodes, and on the root's node to the root."""
    levels = Levels(b).led_by(b.root)
    inside, among = b.params["inside"], b.params["among"]
    parts = [("reduce", among, len(levels.nodes))]
    parts += [("reduce", inside, size) for size in _inside_sizes(levels)]
    blocks = _stripes(b, levels, parts)
    sums = b.out if b.rank == b.root else b.tmp(b.nblk)
    _reduce_inside(b, levels, blocks, sums)
    home = levels.node_of(b.root)
    for stripe in levels.led():
        mine = [_stripe(sums, stripe, blocks)]
        at_home = mine if levels.node == home else []
        run(
            *(b, "reduce", among, levels.leaders(stripe)),
            inp=mine,
            out=at_home,
            root=home,
        )
    if levels.node != home:
        return
    for stripe in range(levels.stripes):
        leader = levels.leader(home, stripe)
        if leader == b.rank != b.root:
            b.send(_stripe(sums, stripe, blocks), b.root)
        if leader != b.rank == b.root:
            b.recv(_stripe(b.out, stripe, blocks), leader)


@algorithm(
    "bcast",
    "two_level",
    complexity=160,
    params=_choices(("bcast",), "bcast", "binomial"),
    spans_nodes=True,
    offered=_offered(
        *("bine", "halving_doubling", "chain", "direct", "scatter_allgather")
    ),
    latency=True,
    bandwidth=True,
)
def bcast(b: Builder) -> None:
    """Broadcast on the root's node, between nodes, and on the other nodes."""
    levels = Levels(b).led_by(b.root)
    inside, among = b.params["inside"], b.params["among"]
    parts = [("bcast", among, len(levels.nodes))]
    parts += [("bcast", inside, size) for size in _inside_sizes(levels)]
    blocks = _stripes(b, levels, parts)
    home = levels.node_of(b.root)
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
        # The root's own node need not wait for anyone.
        _bcast_among(b, levels, blocks, home)
    if levels.node == home:
        for stripe in range(levels.stripes):
            where = [_stripe(b.out, stripe, blocks)]
            run(
                *(b, "bcast", inside, levels.own),
                inp=where if b.rank == b.root else [],
                out=where,
                root=levels.place(b.root),
            )
    if b.rank != b.root:
        _bcast_among(b, levels, blocks, home)
    if levels.node != home:
        _bcast_inside(b, levels, blocks)


def _bcast_among(b: Builder, levels: Levels, blocks: int, home: int) -> None:
    for stripe in levels.led():
        where = [_stripe(b.out, stripe, blocks)]
        run(
            *(b, "bcast", b.params["among"], levels.leaders(stripe)),
            inp=where if levels.node == home else [],
            out=where,
            root=home,
        )


# The operations with a block per rank


@algorithm(
    "allgather",
    "two_level",
    complexity=160,
    params=_choices(("bcast",), "allgather", "ring"),
    spans_nodes=True,
    offered=_offered("ring", "direct", "recursive_doubling"),
    latency=True,
    bandwidth=True,
)
def allgather(b: Builder) -> None:
    """Swap blocks on the node, gather between nodes, broadcast the rest on the node."""
    levels = Levels(b)
    b.copy(b.out[b.rank], b.inp[0])
    others = [rank for rank in levels.own if rank != b.rank]
    for peer in others:
        b.send(b.inp[0], peer)
    for peer in others:
        b.recv(b.out[peer], peer)
    for stripe_number in levels.led():
        stripe = levels.stripe(stripe_number)
        packed = b.tmp(b.size)
        for place, rank in enumerate(stripe.ranks[levels.node]):
            b.copy(packed[stripe.starts[levels.node] + place], b.out[rank])
        pieces = stripe.pieces(packed)
        run(
            *(b, "allgather", b.params["among"], levels.leaders(stripe_number)),
            inp=[pieces[levels.node]],
            out=pieces,
        )
        for each in stripe.runs(without=levels.node):
            b.copy(each.of(b.out), each.packed(packed))
    for stripe_number in range(levels.stripes):
        leader = levels.leader(levels.node, stripe_number)
        for each in levels.stripe(stripe_number).runs(without=levels.node):
            where = [each.of(b.out)]
            run(
                *(b, "bcast", b.params["inside"], levels.own),
                inp=where if leader == b.rank else [],
                out=where,
                root=levels.place(leader),
            )


@algorithm(
    "reduce_scatter",
    "two_level",
    complexity=160,
    params=_choices(("reduce",), "reduce_scatter", "pairwise"),
    spans_nodes=True,
    offered=_offered("pairwise", "halving_doubling", "ring", "direct"),
    latency=True,
    bandwidth=True,
)
def reduce_scatter(b: Builder) -> None:
    """Reduce on the node, reduce-scatter between nodes, hand blocks out on the node."""
    levels = Levels(b)
    sums = {stripe: b.tmp(b.size) for stripe in levels.led()}
    for number in range(levels.stripes):
        leader = levels.leader(levels.node, number)
        for each in levels.stripe(number).runs():
            run(
                *(b, "reduce", b.params["inside"], levels.own),
                inp=[each.of(b.inp)],
                out=[each.packed(sums[number])] if leader == b.rank else [],
                root=levels.place(leader),
            )
    for number, packed in sums.items():
        stripe = levels.stripe(number)
        mine = b.tmp(b.size)
        ranks = stripe.ranks[levels.node]
        run(
            *(b, "reduce_scatter", b.params["among"], levels.leaders(number)),
            inp=stripe.pieces(packed),
            out=[Slice(mine.space, 0, len(ranks))],
        )
        for place, rank in enumerate(ranks):
            if rank == b.rank:
                b.copy(b.out[0], mine[place])
            else:
                b.send(mine[place], rank)
    for number in range(levels.stripes):
        leader = levels.leader(levels.node, number)
        if leader != b.rank and b.rank in levels.stripe(number).ranks[levels.node]:
            b.recv(b.out[0], leader)


@algorithm(
    "alltoall",
    "two_level",
    complexity=160,
    params=_choices((), "alltoall", "pairwise"),
    spans_nodes=True,
    offered=_offered("pairwise", "direct", "dissemination"),
    latency=True,
    bandwidth=True,
)
def alltoall(b: Builder) -> None:
    """Hand blocks to the leader for their rank, swap between nodes, hand them out."""
    levels = Levels(b)
    stripes = [levels.stripe(number) for number in range(levels.stripes)]
    bundles = {number: b.tmp(b.size * len(levels.own)) for number in levels.led()}
    for number, stripe in enumerate(stripes):
        _collect(b, levels, stripe, levels.leader(levels.node, number), bundles, number)
    for number, packed in bundles.items():
        stripe = stripes[number]
        ranks = stripe.ranks[levels.node]
        arrived = b.tmp(b.size * max(1, len(ranks)))
        nodes = range(len(levels.nodes))
        leaving = [_part(packed, len(levels.own), stripe, node) for node in nodes]
        arriving = _arriving(arrived, levels, len(ranks))
        run(
            *(b, "alltoall", b.params["among"], levels.leaders(number)),
            inp=leaving,
            out=arriving,
        )
        _hand_out(b, levels, ranks, arrived)
    for number, stripe in enumerate(stripes):
        leader = levels.leader(levels.node, number)
        if leader != b.rank and b.rank in stripe.ranks[levels.node]:
            came = b.tmp(b.size)
            b.recv(came[:], leader)
            _unpack(b, levels, came)


def _part(packed: Buffer, members: int, stripe: Stripe, node: int) -> Slice:
    """Return the blocks to a node: from each member one per rank of the stripe."""
    start, width = members * stripe.starts[node], members * len(stripe.ranks[node])
    return Slice(packed.space, start, start + width)


def _collect(
    b: Builder,
    levels: Levels,
    stripe: Stripe,
    leader: int,
    bundles: Mapping[int, Buffer],
    number: int,
) -> None:
    """Bring the node's blocks for the ranks of a stripe to its leader."""
    num = len(levels.own)
    for node, ranks in enumerate(stripe.ranks):
        for each in consecutive(ranks):
            if leader != b.rank:
                b.send(b.inp[each.first : each.stop], leader)
                continue
            start = num * stripe.starts[node] + each.place
            for place, member in enumerate(levels.own):
                at = start + place * len(ranks)
                where = bundles[number][at : at + each.stop - each.first]
                if member == b.rank:
                    b.copy(where, b.inp[each.first : each.stop])
                else:
                    b.recv(where, member)


def _arriving(arrived: Buffer, levels: Levels, num: int) -> list[Slice]:
    """Return the places of the blocks from each node, for ``num`` ranks of a stripe."""
    found: list[Slice] = []
    start = 0
    for ranks in levels.nodes:
        found.append(Slice(arrived.space, start, start + num * len(ranks)))
        start += num * len(ranks)
    return found


def _hand_out(
    b: Builder, levels: Levels, ranks: Sequence[int], arrived: Buffer
) -> None:
    """Give each rank of a stripe its blocks, in the order of the nodes."""
    for place, rank in enumerate(ranks):
        own = arrived
        if len(ranks) > 1:
            own = b.tmp(b.size)
            for i in range(b.size):
                b.copy(own[i], arrived[i * len(ranks) + place])
        if rank == b.rank:
            _unpack(b, levels, own)
        else:
            b.send(own[: b.size], rank)


def _unpack(b: Builder, levels: Levels, packed: Buffer) -> None:
    """Put blocks that lie in the order of the nodes into the order of the ranks."""
    place = 0
    for ranks in levels.nodes:
        for each in consecutive(ranks):
            num = each.stop - each.first
            b.copy(b.out[each.first : each.stop], packed[place : place + num])
            place += num
