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
    """For each trainer whose model it judged beside its own: itself, none beside it;
    None, it judged none."""
    judgements: tuple[Judgement, ...]
    """The scores that each trainer gave."""
    sources: tuple[int, ...]
    """For each trainer whose model it goes on with."""

    @property
    def partner(self) -> int | None:
        """The other trainer that this one played; None: it played none."""
        partner = self.partners[self.trainer]
        return None if partner == self.trainer else partner

    @property
    def source(self) -> int:
        """The trainer whose model this one goes on with."""
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
