# SPDX-License-Identifier: Apache-2.0
"""Scores of a round, and which of two is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["MODES", "Judgement", "Rank", "Standing", "mean_score"]

MODES = ("min", "max")
"""The better score is the smaller one, or the larger one."""

Rank: TypeAlias = tuple[bool, float]
"""Orders scores, the better one first."""


class Judgement(NamedTuple):
    """Scores that one trainer gives on its own data.

    None: it has not judged that model.
    """

    own: float | None = None
    """Of its own model."""
    other: float | None = None
    """Of its partner's model."""


class Standing(NamedTuple):
    """The scores of one round, the same on all ranks."""

    judgements: tuple[Judgement, ...]
    """Of each trainer."""
    mode: str
    """"min" or "max": the better score is the smaller one, or the larger one."""

    def rank(self, score: float | None) -> Rank:
        """Return a key that is smaller for a better score.

        NaN and a missing score are worse than any number, and equal to each other.
        """
        if score is None or math.isnan(score):
            return True, 0.0
        return False, score if self.mode == "min" else -score

    def is_better(self, score: float | None, than: float | None) -> bool:
        """Return whether a score is strictly better than another one."""
        return self.rank(score) < self.rank(than)

    def by_own_score(self) -> list[int]:
        """Return the trainers by the scores of their own models, the best one first.

        Of equal ones the lower trainer comes first.
        """
        owns = [self.rank(each.own) for each in self.judgements]
        return sorted(range(len(owns)), key=lambda trainer: (owns[trainer], trainer))


def mean_score(scores: Sequence[float]) -> float:
    """Return the mean of scores, with the very bits of scores that are all equal."""
    if all(score == scores[0] for score in scores):
        return scores[0]  # a third of three times a number may be another number
    return sum(scores) / len(scores)
