# SPDX-License-Identifier: Apache-2.0
"""Two-level: one algorithm inside the nodes and another one between them.

The vector is cut into *lanes*, one per leader: each node has one *leader* for each
lane. What the ranks of a node contribute to a lane comes together at its leader (on the
node), the leaders of one lane run the operation among themselves (between nodes), and
each gives its node the result (on the node). ``leaders=1`` sends one message between
nodes where a flat algorithm sends many; with ``leaders=all``, the multi-leader form,
every rank of the fullest node leads a lane, so that all cores of a node send at once.
On a node with fewer ranks than lanes some ranks lead several. In an allgather a lane is
made of the blocks of some ranks of each node, in an alltoall of those for some ranks.

``inside`` names the algorithm on the nodes (of reduce, of bcast, or one that both
have), ``among`` that between them (of the operation itself); each with its default
parameters. Nodes may have any numbers of ranks, and these any order.

Cost: what ``inside`` costs on a node plus what ``among`` costs on as many ranks as
there are nodes, on N/lanes for each leader. Bytes between nodes are those of ``among``,
which for a whole node is the least there can be; a flat algorithm sends up to k times
as many, for k ranks per node.

Karonis, de Supinski, Foster, Gropp, Lusk and Bresnahan, "Exploiting hierarchy in
parallel computer networks to optimize collective operation performance", IPDPS 2000,
section 3; Bayatpour, Chakraborty, Subramoni, Lu and Panda, "Scalable reduction
collectives with data partitioning-based multi-leader design", SC 2017, section 4;
Traff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication",
CLUSTER 2020, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from commrt.algorithms._nested import common_names, cut, run
from commrt.algorithms._registry import algorithm, get
from commrt.schedule.builder import Buffer, Builder
from commrt.schedule.ir import ParamValue, Slice
from commrt.schedule.nodes import Nodes, members

_ALL = "all"
_MANY_LEADERS = 128


class Levels:
    """Who leads which lane, as this rank sees it.

    Attributes:
        nodes: the ranks of each node; node: the number of this rank's.
        lanes: how many lanes there are.
    """

    def __init__(self, b: Builder) -> None:
        self._b = b
        self.nodes = b.nodes
        self.node = next(i for i, own in enumerate(self.nodes) if b.rank in own)
        asked = b.params["leaders"]
        self.lanes = max(map(len, self.nodes)) if asked == _ALL else int(asked)
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

    def leader(self, node: int, lane: int) -> int:
        """Return who leads a lane on a node."""
        ranks = self.nodes[node]
        at = self._first[node] + lane * len(ranks) // self.lanes
        return ranks[at % len(ranks)]

    def leaders(self, lane: int) -> list[int]:
        """Return who leads a lane, node by node."""
        return [self.leader(node, lane) for node in range(len(self.nodes))]

    def place(self, rank: int) -> int:
        """Return the place of ``rank`` on this rank's node."""
        return self.own.index(rank)

    def led(self) -> Iterator[int]:
        """Yield the lanes that this rank leads."""
        for lane in range(self.lanes):
            if self.leader(self.node, lane) == self._b.rank:
                yield lane

    def ranks_in(self, node: int, lane: int) -> list[int]:
        """Return the ranks of a node whose blocks are in a lane."""
        ranks = self.nodes[node]
        return [
            rank
            for i, rank in enumerate(ranks)
            if ((i + 1) * self.lanes - 1) // len(ranks) == lane
        ]


# What may be named


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
        if len(set(sizes)) > 1 and coll in _BLOCK_PER_RANK:
            able = [name for name in able if _takes_unequal_blocks(coll, name)]
        return {**found, "among": _first(among, able)}

    return choices


_BLOCK_PER_RANK = ("allgather", "reduce_scatter", "alltoall")


def _takes_unequal_blocks(coll: str, name: str) -> bool:
    """Return whether a node's blocks may be more than another one's.

    All that keep the blocks of a rank at its place can, and the tests prove it of those
    here; dissemination has them in an order of its own.
    """
    return get(coll, name).built_in and name != "dissemination"


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


def _lanes(b: Builder, levels: Levels, parts: list[tuple[str, str, int]]) -> int:
    """Cut the vector into lanes of blocks; return the blocks of a lane."""
    blocks = cut(parts)
    b.blocks(levels.lanes * blocks)
    return blocks


def _lane(buffer: Buffer, lane: int, blocks: int) -> Slice:
    return buffer[lane * blocks : (lane + 1) * blocks]


def _inside_sizes(levels: Levels) -> set[int]:
    return set(map(len, levels.nodes))


@algorithm(
    "allreduce",
    "two_level",
    params=_choices(("reduce", "bcast"), "allreduce", "recursive_doubling"),
    spans_nodes=True,
    offered=_offered("recursive_doubling", "halving_doubling", "ring"),
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
    blocks = _lanes(b, levels, parts)
    _reduce_inside(b, levels, blocks, b.out)
    for lane in levels.led():
        mine = [_lane(b.out, lane, blocks)]
        run(b, "allreduce", among, levels.leaders(lane), inp=mine, out=mine)
    _bcast_inside(b, levels, blocks)


def _reduce_inside(b: Builder, levels: Levels, blocks: int, sums: Buffer) -> None:
    """Give each leader of the node the sum of its lane, in ``sums``."""
    for lane in range(levels.lanes):
        leader = levels.leader(levels.node, lane)
        run(
            b,
            "reduce",
            b.params["inside"],
            levels.own,
            inp=[_lane(b.inp, lane, blocks)],
            out=[_lane(sums, lane, blocks)] if leader == b.rank else [],
            root=levels.place(leader),
        )


def _bcast_inside(b: Builder, levels: Levels, blocks: int) -> None:
    """Give every rank of the node what each leader has in its lane of ``out``."""
    for lane in range(levels.lanes):
        leader = levels.leader(levels.node, lane)
        where = [_lane(b.out, lane, blocks)]
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
    params=_choices(("reduce",), "reduce", "binomial"),
    spans_nodes=True,
    offered=_offered("binomial", "halving_doubling", "chain"),
    latency=True,
    bandwidth=True,
)
def reduce(b: Builder) -> None:
    """Reduce on the node, between nodes, and on the root's node to the root."""
    levels = Levels(b).led_by(b.root)
    inside, among = b.params["inside"], b.params["among"]
    parts = [("reduce", among, len(levels.nodes))]
    parts += [("reduce", inside, size) for size in _inside_sizes(levels)]
    blocks = _lanes(b, levels, parts)
    sums = b.out if b.rank == b.root else b.tmp(b.nblk)
    _reduce_inside(b, levels, blocks, sums)
    home = levels.node_of(b.root)
    for lane in levels.led():
        mine = [_lane(sums, lane, blocks)]
        at_home = mine if levels.node == home else []
        run(
            *(b, "reduce", among, levels.leaders(lane)),
            inp=mine,
            out=at_home,
            root=home,
        )
    if levels.node != home:
        return
    for lane in range(levels.lanes):
        leader = levels.leader(home, lane)
        if leader == b.rank != b.root:
            b.send(_lane(sums, lane, blocks), b.root)
        if leader != b.rank == b.root:
            b.recv(_lane(b.out, lane, blocks), leader)


@algorithm(
    "bcast",
    "two_level",
    params=_choices(("bcast",), "bcast", "binomial"),
    spans_nodes=True,
    offered=_offered("binomial", "halving_doubling", "chain"),
    latency=True,
    bandwidth=True,
)
def bcast(b: Builder) -> None:
    """Broadcast on the root's node, between nodes, and on the other nodes."""
    levels = Levels(b).led_by(b.root)
    inside, among = b.params["inside"], b.params["among"]
    parts = [("bcast", among, len(levels.nodes))]
    parts += [("bcast", inside, size) for size in _inside_sizes(levels)]
    blocks = _lanes(b, levels, parts)
    home = levels.node_of(b.root)
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
        # What it leads itself need not wait for anyone.
        _bcast_among(b, levels, blocks, home)
    if levels.node == home:
        for lane in range(levels.lanes):
            where = [_lane(b.out, lane, blocks)]
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
    for lane in levels.led():
        where = [_lane(b.out, lane, blocks)]
        run(
            *(b, "bcast", b.params["among"], levels.leaders(lane)),
            inp=where if levels.node == home else [],
            out=where,
            root=home,
        )


# The operations with a block per rank


class Run(NamedTuple):
    """Blocks of consecutive ranks that lie one behind the other in a lane, too."""

    place: int
    """Of the first, in the lane."""
    first: int
    """The first rank."""
    stop: int
    """The rank behind the last."""

    def of(self, buffer: Buffer) -> Slice:
        """Return them in a buffer with a block per rank."""
        return buffer[self.first : self.stop]

    def packed(self, buffer: Buffer) -> Slice:
        """Return them in a buffer that holds the lane."""
        return buffer[self.place : self.place + self.stop - self.first]


class Lane:
    """The blocks of one lane, packed: those of a node's ranks lie together."""

    def __init__(self, levels: Levels, lane: int) -> None:
        nodes = range(len(levels.nodes))
        self.ranks = [levels.ranks_in(node, lane) for node in nodes]
        self.starts = [sum(map(len, self.ranks[:node])) for node in nodes]

    def pieces(self, buffer: Buffer) -> list[Slice]:
        """Return the blocks of each node in ``buffer``; some may be empty."""
        space, lo = buffer.space, buffer.lo
        return [
            Slice(space, lo + start, lo + start + len(ranks))
            for start, ranks in zip(self.starts, self.ranks, strict=True)
        ]

    def runs(self, without: int | None = None) -> list[Run]:
        """Return the longest runs, of all nodes but one."""
        found: list[Run] = []
        for node, ranks in enumerate(self.ranks):
            for i, rank in enumerate(ranks if node != without else ()):
                place = self.starts[node] + i
                last = found[-1] if found else None
                if last and last.stop == rank and sum(last[::2]) - last.first == place:
                    found[-1] = last._replace(stop=rank + 1)
                else:
                    found.append(Run(place, rank, rank + 1))
        return found


@algorithm(
    "allgather",
    "two_level",
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
    for lane_number in levels.led():
        lane = Lane(levels, lane_number)
        packed = b.tmp(b.size)
        for place, rank in enumerate(lane.ranks[levels.node]):
            b.copy(packed[lane.starts[levels.node] + place], b.out[rank])
        pieces = lane.pieces(packed)
        run(
            *(b, "allgather", b.params["among"], levels.leaders(lane_number)),
            inp=[pieces[levels.node]],
            out=pieces,
        )
        for each in lane.runs(without=levels.node):
            b.copy(each.of(b.out), each.packed(packed))
    for lane_number in range(levels.lanes):
        leader = levels.leader(levels.node, lane_number)
        for each in Lane(levels, lane_number).runs(without=levels.node):
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
    params=_choices(("reduce",), "reduce_scatter", "pairwise"),
    spans_nodes=True,
    offered=_offered("pairwise", "halving_doubling", "ring"),
    latency=True,
    bandwidth=True,
)
def reduce_scatter(b: Builder) -> None:
    """Reduce on the node, reduce-scatter between nodes, hand blocks out on the node."""
    levels = Levels(b)
    sums = {lane: b.tmp(b.size) for lane in levels.led()}
    for number in range(levels.lanes):
        leader = levels.leader(levels.node, number)
        for each in Lane(levels, number).runs():
            run(
                *(b, "reduce", b.params["inside"], levels.own),
                inp=[each.of(b.inp)],
                out=[each.packed(sums[number])] if leader == b.rank else [],
                root=levels.place(leader),
            )
    for number, packed in sums.items():
        lane = Lane(levels, number)
        mine = b.tmp(b.size)
        ranks = lane.ranks[levels.node]
        run(
            *(b, "reduce_scatter", b.params["among"], levels.leaders(number)),
            inp=lane.pieces(packed),
            out=[Slice(mine.space, 0, len(ranks))],
        )
        for place, rank in enumerate(ranks):
            if rank == b.rank:
                b.copy(b.out[0], mine[place])
            else:
                b.send(mine[place], rank)
    for number in range(levels.lanes):
        leader = levels.leader(levels.node, number)
        if leader != b.rank and b.rank in levels.ranks_in(levels.node, number):
            b.recv(b.out[0], leader)


@algorithm(
    "alltoall",
    "two_level",
    params=_choices((), "alltoall", "pairwise"),
    spans_nodes=True,
    offered=_offered("pairwise", "direct", "dissemination"),
    latency=True,
    bandwidth=True,
)
def alltoall(b: Builder) -> None:
    """Hand blocks to the leader for their rank, swap between nodes, hand them out."""
    levels = Levels(b)
    lanes = [Lane(levels, number) for number in range(levels.lanes)]
    bundles = {number: b.tmp(b.size * len(levels.own)) for number in levels.led()}
    for number, lane in enumerate(lanes):
        _collect(b, levels, lane, levels.leader(levels.node, number), bundles, number)
    for number, packed in bundles.items():
        lane = lanes[number]
        ranks = lane.ranks[levels.node]
        arrived = b.tmp(b.size * max(1, len(ranks)))
        nodes = range(len(levels.nodes))
        leaving = [_part(packed, len(levels.own), lane, node) for node in nodes]
        arriving = _arriving(arrived, levels, len(ranks))
        run(
            *(b, "alltoall", b.params["among"], levels.leaders(number)),
            inp=leaving,
            out=arriving,
        )
        _hand_out(b, levels, ranks, arrived)
    for number, lane in enumerate(lanes):
        leader = levels.leader(levels.node, number)
        if leader != b.rank and b.rank in lane.ranks[levels.node]:
            came = b.tmp(b.size)
            b.recv(came[:], leader)
            _unpack(b, levels, came)


def _part(packed: Buffer, members: int, lane: Lane, node: int) -> Slice:
    """Return what goes to a node: from each member a block per rank of the lane."""
    start, width = members * lane.starts[node], members * len(lane.ranks[node])
    return Slice(packed.space, start, start + width)


def _collect(
    b: Builder,
    levels: Levels,
    lane: Lane,
    leader: int,
    bundles: Mapping[int, Buffer],
    number: int,
) -> None:
    """Bring the node's blocks for the ranks of a lane to its leader."""
    num = len(levels.own)
    for node, ranks in enumerate(lane.ranks):
        for each in _consecutive(ranks):
            if leader != b.rank:
                b.send(b.inp[each.first : each.stop], leader)
                continue
            start = num * lane.starts[node] + each.place
            for place, member in enumerate(levels.own):
                at = start + place * len(ranks)
                where = bundles[number][at : at + each.stop - each.first]
                if member == b.rank:
                    b.copy(where, b.inp[each.first : each.stop])
                else:
                    b.recv(where, member)


def _consecutive(ranks: Sequence[int]) -> list[Run]:
    found: list[Run] = []
    for place, rank in enumerate(ranks):
        if found and found[-1].stop == rank:
            found[-1] = found[-1]._replace(stop=rank + 1)
        else:
            found.append(Run(place, rank, rank + 1))
    return found


def _arriving(arrived: Buffer, levels: Levels, num: int) -> list[Slice]:
    """Return where the blocks from each node arrive, for ``num`` ranks of the lane."""
    found: list[Slice] = []
    start = 0
    for ranks in levels.nodes:
        found.append(Slice(arrived.space, start, start + num * len(ranks)))
        start += num * len(ranks)
    return found


def _hand_out(
    b: Builder, levels: Levels, ranks: Sequence[int], arrived: Buffer
) -> None:
    """Give each rank of a lane its blocks, in the order of the nodes."""
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
        for each in _consecutive(ranks):
            num = each.stop - each.first
            b.copy(b.out[each.first : each.stop], packed[place : place + num])
            place += num
