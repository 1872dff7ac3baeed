# SPDX-License-Identifier: Apache-2.0
"""Recursive doubling (SparCML's SSAR_Recursive_double).

In round j every rank exchanges all it has with the rank whose number differs in bit j,
and merges: after log2 P rounds everybody has the sum. Few messages, but what two ranks
have in common is sent again and again, so it is for short vectors. Ranks beyond the
largest power of two give their entries to a rank below it first, and get the result
from there.

    (log2 P) alpha + between k·log2 P and k(P-1) entries, moved and merged

A sum that has become dense stays so. Both sides of each exchange decide by the same
numbers, so all ranks end with the same format.
"""

from __future__ import annotations

from commrt.group.stepped import Steps
from commrt.sparse.messages import Talk, exchange
from commrt.sparse.pieces import Piece

__all__ = ["recursive_doubling"]


def recursive_doubling(talk: Talk, mine: Piece) -> Steps[Piece]:
    """Return the sum of all ranks' pieces on every rank."""
    size, me = talk.comm.size, talk.comm.rank
    even = 1 << (size.bit_length() - 1)
    beyond = size - even
    if me >= even:
        yield from exchange(talk, [(me - even, mine)], [])
        (result,) = yield from exchange(talk, [], [me - even])
        return result
    if me < beyond:
        (other,) = yield from exchange(talk, [], [me + even])
        mine = talk.elements.merge(mine, other)
    distance = 1
    while distance < even:
        peer = me ^ distance
        (other,) = yield from exchange(talk, [(peer, mine)], [peer])
        # In the order of ranks, so that both compute the very same sum.
        pair = (mine, other) if me < peer else (other, mine)
        mine = talk.elements.merge(*pair)
        distance *= 2
    if me < beyond:
        yield from exchange(talk, [(me + even, mine)], [])
    return mine
