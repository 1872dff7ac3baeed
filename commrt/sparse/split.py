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
from typing import Any

from commrt.sparse.messages import Talk, exchange
from commrt.sparse.pieces import Piece, even_bounds
from commrt.stepped import Steps

__all__ = ["split"]


def split(
    talk: Talk,
    mine: Piece,
    *,
    dense: bool = False,
    bounds: Sequence[int] | None = None,
    counts: Any = None,
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
            Piece(here.first, here.last, False, int(counts[s][me]), 0, 0, None)
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
