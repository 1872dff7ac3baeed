# SPDX-License-Identifier: Apache-2.0
"""Two-level gather and scatter: one message per node between nodes.

*Gather*: the ranks of a node send their blocks to its leader, and the leaders gather
the nodes' blocks. *Scatter*: the leaders scatter the nodes' blocks, and each hands its
ranks theirs. The root leads its node. The root's port carries all blocks in any case,
so one leader per node is enough.

``among`` names the algorithm between nodes; nodes with unequal numbers of ranks have
``direct`` alone. Ranks may have any order: where those of each node follow one another,
the root receives straight into its output and sends straight from its input.

Cost: (k-1) messages on a node of k ranks, and what ``among`` costs on as many ranks as
there are nodes: with ``direct`` alpha (1 + (S-2)/4) + (P-k)/P N beta for S nodes.

Karonis, de Supinski, Foster, Gropp, Lusk and Bresnahan, "Exploiting hierarchy in
parallel computer networks to optimize collective operation performance", IPDPS 2000,
section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from commrt.algorithms._nested import common_names, run
from commrt.algorithms._registry import algorithm
from commrt.algorithms._stripes import consecutive
from commrt.schedule.builder import Buffer, Builder
from commrt.schedule.ir import ParamValue, Slice
from commrt.schedule.nodes import Nodes, members


class _Levels:
    """The leaders, and where the nodes' blocks lie.

    Attributes:
        home: the number of the root's node.
        own: the ranks of this rank's node.
        leaders: the leader of each node.
        node: the number of this rank's node.
    """

    def __init__(self, b: Builder) -> None:
        self._b, self._nodes = b, b.nodes
        self.home = self._node_of(b.root)
        self.node = self._node_of(b.rank)
        self.own = self._nodes[self.node]
        self.leaders = [ranks[0] for ranks in self._nodes]
        self.leaders[self.home] = b.root
        self._starts = [0, *accumulate(map(len, self._nodes))][:-1]
        self.in_order = all(len(consecutive(ranks)) == 1 for ranks in self._nodes)

    def _node_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self._nodes) if rank in ranks)

    @property
    def leader(self) -> int:
        """The leader of this rank's node."""
        return self.leaders[self.node]

    def packed(self, buffer: Buffer) -> list[Slice]:
        """Return each node's blocks in a buffer where they lie node by node."""
        return [
            buffer[start : start + len(ranks)]
            for start, ranks in zip(self._starts, self._nodes, strict=True)
        ]

    def placed(self, buffer: Buffer) -> list[Slice]:
        """Return them in a buffer in the order of the ranks, if they lie together."""
        return [buffer[ranks[0] : ranks[-1] + 1] for ranks in self._nodes]

    def by_rank(self, buffer: Buffer) -> dict[int, Slice]:
        """Return the block of each rank in a buffer where they lie node by node."""
        ranks = (rank for own in self._nodes for rank in own)
        return {rank: buffer[place] for place, rank in enumerate(ranks)}


def _gathers(nodes: Nodes | None) -> Mapping[str, tuple[ParamValue, ...]]:
    return _among("gather", nodes)


def _scatters(nodes: Nodes | None) -> Mapping[str, tuple[ParamValue, ...]]:
    return _among("scatter", nodes)


def _among(coll: str, nodes: Nodes | None) -> Mapping[str, tuple[ParamValue, ...]]:
    """Return what names the algorithms that these nodes allow."""
    sizes = list(map(len, members(nodes))) if nodes else []
    able = common_names([coll], [len(sizes)] if nodes else [])
    if len(set(sizes)) > 1:
        # Trees that count from the root put a node's blocks at another one's place.
        able = []
    return {"among": ("direct", *(name for name in able if name != "direct"))}


def _offered(size: int, params: Mapping[str, ParamValue]) -> bool:
    return params["among"] in ("direct", "bine")


@algorithm(
    "gather",
    "two_level",
    complexity=160,
    params=_gathers,
    spans_nodes=True,
    offered=_offered,
    latency=True,
    bandwidth=True,
)
def gather(b: Builder) -> None:
    """Send the block to the node's leader; the leaders gather the nodes' blocks."""
    levels = _Levels(b)
    if b.rank != levels.leader:
        b.send(b.inp[0], levels.leader)
        return
    straight = b.rank == b.root and levels.in_order
    packed = b.out if straight else b.tmp(b.size)
    place = {rank: packed[rank] for rank in range(b.size)}
    if not straight:
        place = levels.by_rank(packed)
    b.copy(place[b.rank], b.inp[0])
    for rank in levels.own:
        if rank != b.rank:
            b.recv(place[rank], rank)
    pieces = levels.placed(packed) if straight else levels.packed(packed)
    run(
        *(b, "gather", b.params["among"], levels.leaders),
        inp=[pieces[levels.node]],
        out=pieces,
        root=levels.home,
    )
    if b.rank == b.root and not straight:
        for rank, where in place.items():
            b.copy(b.out[rank], where)


@algorithm(
    "scatter",
    "two_level",
    complexity=160,
    params=_scatters,
    spans_nodes=True,
    offered=_offered,
    latency=True,
    bandwidth=True,
)
def scatter(b: Builder) -> None:
    """The leaders scatter the nodes' blocks; each gives its ranks theirs."""
    levels = _Levels(b)
    if b.rank != levels.leader:
        b.recv(b.out[0], levels.leader)
        return
    packed = b.tmp(b.size)
    place = levels.by_rank(packed)
    pieces = levels.packed(packed)
    mine = pieces[levels.node]
    if b.rank == b.root:
        if levels.in_order:
            pieces = levels.placed(b.inp)
        else:
            for rank, where in place.items():
                b.copy(where, b.inp[rank])
            mine = levels.packed(b.tmp(b.size))[levels.node]
    run(
        *(b, "scatter", b.params["among"], levels.leaders),
        inp=pieces,
        out=[mine],
        root=levels.home,
    )
    for at, rank in enumerate(levels.own):
        block = Slice(mine.space, mine.lo + at, mine.lo + at + 1)
        if b.rank == b.root:
            block = b.inp[rank]
        if rank == b.rank:
            b.copy(b.out[0], block)
        else:
            b.send(block, rank)
