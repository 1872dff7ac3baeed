# SPDX-License-Identifier: Apache-2.0
"""Ring, of all ranks or inside and between nodes (IPCCC 2019).

Indices are cut into as many ranges as the ring has ranks. In each of P-1 rounds a rank
sends one range's sum so far to its right and merges what comes from its left, so sums
grow as they go round; each range becomes dense when its own entries say so. Ranks only
ever talk to their neighbours, which is what a network without a switch in the middle
wants.

    2(P-1) alpha + 2(P-1)/P summed entries at most

The topology-aware form is a ring inside each node, then, for the range that a rank has
summed, a ring of the ranks that have the same range on all nodes; the ranges are
gathered in the reverse order. Between nodes only 1/L of the entries of a node go over
each of L links. Every node must have the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from commrt.errors import UsageError
from commrt.group.stepped import Steps
from commrt.sparse.messages import Talk, allgather, exchange
from commrt.sparse.pieces import Piece, even_bounds

__all__ = ["ring_sum", "two_level_ring", "why_not_two_level"]


def ring_sum(talk: Talk, ranks: Sequence[int], mine: Piece) -> Steps[Piece]:
    """Return the sum over ``ranks`` of one range of ``mine``: the r-th on the r-th."""
    size = len(ranks)
    me = list(ranks).index(talk.comm.rank)
    parts = talk.elements.split(mine, even_bounds(mine.first, mine.last, size))
    right, left = ranks[(me + 1) % size], ranks[(me - 1) % size]
    # The range that ends here went off at the right neighbour, all the way round.
    current = parts[(me - 1) % size]
    for step in range(1, size):
        (other,) = yield from exchange(talk, [(right, current)], [left])
        current = talk.elements.merge(other, parts[(me - 1 - step) % size])
    return current


def why_not_two_level(nodes: Sequence[Sequence[int]]) -> str | None:
    """Return why the topology-aware form cannot run, None if it can."""
    counts = [len(node) for node in nodes]
    if len({*counts}) > 1:
        return f"the nodes have {counts} ranks, and it needs equally many on each"
    return None


def two_level_ring(talk: Talk, mine: Piece) -> Steps[list[Piece]]:
    """Return the sum of all ranks as pieces of successive ranges."""
    nodes = talk.comm.nodes
    if (why := why_not_two_level(nodes)) is not None:
        raise UsageError(f"two_level_ring: {why}")
    here = next(node for node in nodes if talk.comm.rank in node)
    alike = [node[here.index(talk.comm.rank)] for node in nodes]
    inside = yield from ring_sum(talk, here, mine)
    summed = yield from ring_sum(talk, alike, inside)
    between = yield from allgather(talk, alike, [summed])
    pieces = yield from allgather(talk, here, between)
    return pieces
