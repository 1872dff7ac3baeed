# SPDX-License-Identifier: Apache-2.0
"""Folding: how algorithms for a power of two serve every number of ranks.

Of P ranks Q = 2^⌊log₂ P⌋ *participate*. The first 2(P-Q) ranks pair up, and the odd one of
a pair is *folded*: the even one acts for both. Participant v < P-Q is rank 2v, the others
are rank v + P-Q; so the ranks that a participant acts for are neighbours, and so are
their blocks.
"""

from __future__ import annotations

from commrt.schedule.builder import Builder

__all__ = ["Fold"]


class Fold:
    """Who participates among the ranks of ``b``, and this rank's part.

    Attributes:
        num: number of participants, a power of two; steps: its logarithm.
        ranks: the rank of each participant.
        folded: whether this rank leaves its part to the rank before it.
        folds: whether this rank also acts for the rank after it.
        participant: the number of this participant, or of the one that acts for it.
    """

    def __init__(self, b: Builder) -> None:
        self.steps = b.size.bit_length() - 1
        self.num = 1 << self.steps
        self._extra = b.size - self.num
        self.ranks = [self._start(v) for v in range(self.num)]
        paired = b.rank < 2 * self._extra
        self.folded = paired and b.rank % 2 == 1
        self.folds = paired and b.rank % 2 == 0
        self.participant = b.rank // 2 if paired else b.rank - self._extra

    def _start(self, participant: int) -> int:
        return participant + min(participant, self._extra)

    def blocks(self, first: int, stop: int) -> slice:
        """Return the blocks (one per rank) of participants ``[first, stop)``."""
        return slice(self._start(first), self._start(stop))
