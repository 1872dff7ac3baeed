# SPDX-License-Identifier: Apache-2.0
"""Split and allgather (SparCML's SSAR_Split_allgather and DSAR_Split_allgather).

Each rank owns a range of the indices. It sends every other rank the entries of that
rank's range, sums what it gets for its own, and all ranks gather the ranges. Every
entry crosses once before the sum and once after it.

    2(P-1) alpha + k(P-1)/P entries out + the summed entries of P-1 ranges in

The sum of a range is sparse, or dense where its entries would take more bytes. With
``dense`` it is dense from the start: no merging, for an output that is dense anyhow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from commrt.group.stepped import Steps
from commrt.sparse.messages import Talk, exchange, share_rows
from commrt.sparse.pieces import Piece, even_bounds
from commrt.sparse.shared import Desk

__all__ = ["can_share", "lay_out", "shared_split", "split"]


def split(
    talk: Talk,
    mine: Piece,
    *,
    dense: bool = False,
    bounds: Sequence[int] | None = None,
    counts: Sequence[Sequence[int]] | None = None,
) -> Steps[Piece]:
    """Return the sum of this rank's range: of even ones, or of those in ``bounds``.

    ``counts[s][r]``: the entries that rank s has for rank r, if all know them.
    """
    size, me = talk.comm.size, talk.comm.rank
    if bounds is None:
        bounds = even_bounds(mine.first, mine.last, size)
    parts = talk.elements.split(mine, bounds)
    # Rotated, so that no rank is everybody's first.
    dests = [(me + step) % size for step in range(1, size)]
    sources = [(me - step) % size for step in range(1, size)]
    told = None
    if counts is not None:
        here = parts[me]
        told = [
            Piece(here.first, here.last, False, counts[s][me], 0, 0, None)
            for s in sources
        ]
    found = yield from exchange(talk, [(r, parts[r]) for r in dests], sources, told)
    received = dict(zip(sources, found, strict=True))
    in_order = [parts[me] if r == me else received[r] for r in range(size)]
    if dense:
        in_order[0] = talk.elements.densified(in_order[0])
        for piece in in_order[1:]:
            talk.elements.add_into(in_order[0], piece)
        return in_order[0]
    return talk.elements.merge_all(in_order)


def lay_out(talk: Talk, mine: Piece, offsets: Sequence[int]) -> Desk | None:
    """Show this rank's entries to the others before they are told of them.

    None where there is no room, or where ranges will become dense anyhow.
    """
    room, elements = talk.room, talk.elements
    if room is None or elements.dense_pays(mine.count * talk.comm.size, mine.length):
        return None
    desk = room.desk(talk.seq)
    if desk is None or mine.count > desk.most(elements):
        return None
    desk.lay_out(elements, mine, [*offsets[:-1], mine.count])
    return desk


def can_share(
    talk: Talk, room: int, mine: Piece, counts: Sequence[Sequence[int]]
) -> bool:
    """Return whether ``shared_split`` can run; the same on all ranks.

    Not where a range may become dense, or has more entries than ``room``, the least
    that a rank has room for.
    """
    elements = talk.elements
    most = [sum(column) for column in zip(*counts, strict=True)]
    ranges = pairwise(even_bounds(mine.first, mine.last, talk.comm.size))
    return max(most) <= room and not any(
        elements.dense_pays(entries, last - first)
        for entries, (first, last) in zip(most, ranges, strict=True)
    )


def shared_split(
    talk: Talk, desk: Desk, mine: Piece, counts: Sequence[Sequence[int]]
) -> Steps[list[Piece]]:
    """Return the sums of all ranges, where their ranks have written them.

    Each rank reads the entries of its range where the others have laid them out.
    ``counts[s][r]``: the entries that rank s has for rank r.
    """
    size, me, elements = talk.comm.size, talk.comm.rank, talk.elements
    bounds = even_bounds(mine.first, mine.last, size)
    most = [sum(column) for column in zip(*counts, strict=True)]
    ranges = list(pairwise(bounds))
    found = []
    for rank, row in enumerate(counts):
        low, entries = sum(row[:me]), row[me]
        if rank == me:
            own = elements.part(mine, low, low + entries)
            found.append(replace(own, first=bounds[me], last=bounds[me + 1]))
        else:
            found.append(desk.had(elements, rank, low, entries, *ranges[me]))
    place = desk.summed(elements, me, most[me], *ranges[me])
    talk.note([mine], [piece for rank, piece in enumerate(found) if rank != me])
    summed = elements.sum_into(found, place)
    told = yield from share_rows(talk, np.array([summed.count], np.int64))
    pieces = [
        desk.summed(elements, rank, entries, *ranges[rank])
        for rank, (entries,) in enumerate(told.tolist())
    ]
    talk.note([summed], [piece for rank, piece in enumerate(pieces) if rank != me])
    return pieces
