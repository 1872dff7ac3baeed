# SPDX-License-Identifier: Apache-2.0
"""Rules of a round: whom each trainer plays, and whose model it goes on with.

A rule sees numbers alone, the same ones on all ranks. So all ranks know the outcome for
every trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from commrt.errors import UsageError, shown
from commrt.layers.tournament.draws import Draws
from commrt.layers.tournament.standing import Standing, mean_score
from commrt.vocabulary.checks import as_integer

__all__ = ["Consensus", "Evolution", "Pairwise", "Selection", "Truncation"]


class Selection(Protocol):
    """A rule. Its ``repr`` must be the same on all ranks."""

    def check(self, num_trainers: int) -> None:
        """Raise UsageError where the rule does not go with so many trainers."""

    def partners(self, draws: Draws, num_trainers: int) -> tuple[int | None, ...]:
        """Return for each trainer whose model it judges beside its own.

        Itself: it judges its own model alone. None: it judges none.
        """

    def sources(self, draws: Draws, standing: Standing) -> tuple[int, ...]:
        """Return for each trainer whose model it goes on with."""


@dataclass(frozen=True)
class Pairwise:
    """Random pairs exchange models, and each trainer keeps what it finds better itself.

    Each judges both models on its own data, so both may keep their own model, or both
    take the other one. Of equal scores a trainer keeps its own model. This is the rule
    of LBANN's "RandomPairwiseExchange" (Jacobs et al. 2019, "Parallelizing training of
    deep generative models on massive scientific datasets", arXiv 1910.02270).
    """

    def check(self, num_trainers: int) -> None:
        """Accept any number of trainers."""

    def partners(self, draws: Draws, num_trainers: int) -> tuple[int | None, ...]:
        """Return the other trainer of each one's pair."""
        found: list[int | None] = [None] * num_trainers
        for one, other in draws.pairs(num_trainers):
            found[one], found[other] = other, one
        return tuple(found)

    def sources(self, draws: Draws, standing: Standing) -> tuple[int, ...]:
        """Return the trainer or its partner, as it judges itself."""
        found = [*range(len(standing.judgements))]
        for pair in draws.pairs(len(found)):
            for trainer, partner in (pair, pair[::-1]):
                own, other = standing.judgements[trainer]
                if standing.is_better(other, own):
                    found[trainer] = partner
        return tuple(found)


@dataclass(frozen=True)
class Consensus(Pairwise):
    """Random pairs exchange models and scores, and both go on with the winner.

    A model's score is the mean of those that both trainers give it. Of equal ones the
    lower trainer's model wins.
    """

    def sources(self, draws: Draws, standing: Standing) -> tuple[int, ...]:
        """Return the winner of each one's pair."""
        found = [*range(len(standing.judgements))]
        for pair in draws.pairs(len(found)):
            low, high = sorted(pair)
            ours, theirs = standing.judgements[low], standing.judgements[high]
            of_low = _mean(ours.own, theirs.other)
            of_high = _mean(theirs.own, ours.other)
            winner = high if standing.is_better(of_high, of_low) else low
            found[low] = found[high] = winner
        return tuple(found)


def _mean(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else mean_score((one, other))


@dataclass(frozen=True)
class Truncation:
    """The worst trainers go on with the models of the best ones.

    Each judges its own model alone. The worst trainer takes the best one's model, the
    second worst the second best one's, and so on, where that is strictly better
    (Jaderberg et al. 2017, "Population based training of neural networks", arXiv
    1711.09846, section 4.1.1, where the best ones are drawn by lot).
    """

    num_replaced: int | None = None
    """Models that are replaced, at most half of all. None: a quarter, at least one."""

    def check(self, num_trainers: int) -> None:
        """Raise UsageError unless from 0 to half of the trainers are replaced."""
        number = self.num_replaced
        most = num_trainers // 2
        if number is None:
            return
        if as_integer(number) is None or not 0 <= number <= most:
            raise UsageError(
                f"Truncation: num_replaced={shown(number)} must be an integer from 0 "
                f"to {most}, half of the {num_trainers} trainers"
            )

    def partners(self, draws: Draws, num_trainers: int) -> tuple[int | None, ...]:
        """Return each trainer itself."""
        return tuple(range(num_trainers))

    def sources(self, draws: Draws, standing: Standing) -> tuple[int, ...]:
        """Return one of the best trainers for each of the worst ones."""
        ranking = standing.by_own_score()
        number = self.num_replaced
        if number is None:
            number = min(max(len(ranking) // 4, 1), len(ranking) // 2)
        found = [*range(len(ranking))]
        best, worst = ranking[:number], ranking[::-1][:number]
        for source, trainer in zip(best, worst, strict=True):
            one, other = (standing.judgements[each].own for each in (source, trainer))
            if standing.is_better(one, other):
                found[trainer] = source
        return tuple(found)


@dataclass(frozen=True)
class Evolution:
    """The best model of a random sample replaces the oldest one.

    Each judges its own model alone. Trainers are replaced in turn, round r those of
    number r modulo their number, whatever their score. A best one may replace itself
    (Real et al. 2019, "Regularized evolution for image classifier architecture search",
    arXiv 1802.01548, section 2.2). With ``mutate`` the copy is mutated.
    """

    sample_size: int | None = None
    """Trainers in the sample. None: half of all, at least one."""

    def check(self, num_trainers: int) -> None:
        """Raise UsageError unless the sample has from 1 to all trainers."""
        number = self.sample_size
        if number is None:
            return
        if as_integer(number) is None or not 1 <= number <= num_trainers:
            raise UsageError(
                f"Evolution: sample_size={shown(number)} must be an integer from 1 to "
                f"{num_trainers}, the number of trainers"
            )

    def partners(self, draws: Draws, num_trainers: int) -> tuple[int | None, ...]:
        """Return each trainer itself."""
        return tuple(range(num_trainers))

    def sources(self, draws: Draws, standing: Standing) -> tuple[int, ...]:
        """Return the best trainer of the sample for the oldest one."""
        found = [*range(len(standing.judgements))]
        number = self.sample_size or max(len(found) // 2, 1)
        sample = draws.shuffled(len(found))[:number]
        best = next(each for each in standing.by_own_score() if each in sample)
        if standing.is_better(standing.judgements[best].own, None):  # not all are NaN
            found[draws.round_number % len(found)] = best
        return tuple(found)
