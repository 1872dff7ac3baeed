# SPDX-License-Identifier: Apache-2.0
"""Stripes of operations with a block per rank: whose blocks each leader handles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from commrt.schedule.builder import Buffer
from commrt.schedule.ir import Slice

__all__ = ["Run", "Stripe", "all_stripes", "consecutive"]


class Run(NamedTuple):
    """Blocks of consecutive ranks that lie one behind the other in a stripe, too."""

    place: int
    """Place of the first block, in the stripe."""
    first: int
    """The first rank."""
    stop: int
    """The rank behind the last."""

    def of(self, buffer: Buffer) -> Slice:
        """Return them in a buffer with a block per rank."""
        return buffer[self.first : self.stop]

    def packed(self, buffer: Buffer) -> Slice:
        """Return them in a buffer that holds the stripe."""
        return buffer[self.place : self.place + self.stop - self.first]


class Stripe:
    """The blocks of one stripe, packed: those of a node's ranks lie together.

    Attributes:
        ranks: the ranks of each node whose blocks are in the stripe.
        starts: the place of each node's first block.
    """

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self.ranks = ranks
        self.starts = [0, *accumulate(map(len, ranks))][:-1]
        self._runs: dict[int | None, list[Run]] = {}

    def pieces(self, buffer: Buffer) -> list[Slice]:
        """Return the blocks of each node in ``buffer``; some may be empty."""
        space, lo = buffer.space, buffer.lo
        return [
            Slice(space, lo + start, lo + start + len(ranks))
            for start, ranks in zip(self.starts, self.ranks, strict=True)
        ]

    def runs(self, without: int | None = None) -> list[Run]:
        """Return the longest runs, of all nodes but one."""
        if without not in self._runs:
            self._runs[without] = self._find_runs(without)
        return self._runs[without]

    def _find_runs(self, without: int | None) -> list[Run]:
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


@lru_cache(maxsize=64)
def all_stripes(nodes: tuple[tuple[int, ...], ...], stripes: int) -> tuple[Stripe, ...]:
    """Return what is in each stripe; kept, because all ranks ask."""
    found: list[list[list[int]]] = [[[] for _ in nodes] for _ in range(stripes)]
    for node, ranks in enumerate(nodes):
        for i, rank in enumerate(ranks):
            found[((i + 1) * stripes - 1) // len(ranks)][node].append(rank)
    return tuple(map(Stripe, found))


def consecutive(ranks: Sequence[int]) -> list[Run]:
    """Return runs of ranks that follow one another."""
    found: list[Run] = []
    for place, rank in enumerate(ranks):
        if found and found[-1].stop == rank:
            found[-1] = found[-1]._replace(stop=rank + 1)
        else:
            found.append(Run(place, rank, rank + 1))
    return found
