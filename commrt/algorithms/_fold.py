# SPDX-License-Identifier: Apache-2.0
"""Folding: how algorithms for a power of two serve every number of ranks.

Among P ranks Q = 2^floor(log2 P) *participate*. The first 2(P-Q) ranks pair up, and the
odd one of a pair is *folded*: the even one acts for both. Participant v < P-Q is rank
2v, the others are rank v + P-Q; so the ranks that a participant acts for are
neighbours, and so are their blocks.
"""

from __future__ import annotations

from functools import lru_cache

from commrt.schedule.builder import Builder

__all__ = ["Fold"]


class Fold:
    """The ranks of ``b`` that take part, and this rank's role.

    Attributes:
        num: number of participants, a power of two; steps: its logarithm.
        folded: whether this rank leaves its part to the rank before it.
        folds: whether this rank also acts for the rank after it.
    """

    def __init__(self, b: Builder) -> None:
        self._b = b
        self.steps = b.size.bit_length() - 1
        self.num = 1 << self.steps
        self._extra = b.size - self.num
        paired = b.rank < 2 * self._extra
        self.folded = paired and b.rank % 2 == 1
        self.folds = paired and b.rank % 2 == 0

    def participant(self, rank: int) -> int:
        """Return the number of the participant that acts for ``rank``."""
        return rank // 2 if rank < 2 * self._extra else rank - self._extra

    def group(self) -> Builder:
        """Return the participants as ranks of their own; this rank must be one."""
        return self._b.sub(_participants(self.num, self._extra))

    def blocks(self, first: int, stop: int) -> slice:
        """Return the blocks (one per rank) of participants ``[first, stop)``."""
        return slice(self._start(first), self._start(stop))

    def _start(self, participant: int) -> int:
        return participant + min(participant, self._extra)


@lru_cache(maxsize=64)
def _participants(num: int, extra: int) -> tuple[int, ...]:
    """Return the ranks of ``num`` participants; kept, because all ranks ask."""
    return (*range(0, 2 * extra, 2), *range(2 * extra, num + extra))
