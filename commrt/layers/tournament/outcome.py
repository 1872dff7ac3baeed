# SPDX-License-Identifier: Apache-2.0
"""The outcome of a round, as each rank hears of it."""

from __future__ import annotations

from dataclasses import dataclass

from commrt.layers.tournament.standing import Judgement

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one round; all but ``trainer`` is the same on all ranks."""

    round_number: int
    """From 0 on."""
    trainer: int
    """This rank's."""
    partners: tuple[int | None, ...]
    """The partner of each trainer, whose model it judged beside its own. The trainer
    itself: it judged its own model alone. None: it judged no model."""
    judgements: tuple[Judgement, ...]
    """The scores of each trainer."""
    sources: tuple[int, ...]
    """The trainer whose model each trainer goes on with."""

    @property
    def partner(self) -> int | None:
        """The other trainer that this one played; None: it played none."""
        partner = self.partners[self.trainer]
        return None if partner == self.trainer else partner

    @property
    def source(self) -> int:
        """The trainer whose model this rank's trainer goes on with."""
        return self.sources[self.trainer]

    @property
    def has_taken(self) -> bool:
        """True if this trainer goes on with another one's model."""
        return self.source != self.trainer

    @property
    def own_score(self) -> float | None:
        """Score of this trainer's model by itself; None: it was not judged."""
        return self.judgements[self.trainer].own

    @property
    def other_score(self) -> float | None:
        """Score of the partner's model by this trainer; None: there was none."""
        return self.judgements[self.trainer].other
