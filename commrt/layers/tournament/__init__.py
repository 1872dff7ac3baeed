# SPDX-License-Identifier: Apache-2.0
"""Tournaments of models that groups of ranks train, each on data of its own.

docs/reference/tournament.md says how to use them.
"""

from commrt.layers.tournament.draws import Draws
from commrt.layers.tournament.mutation import Mutation, Perturb
from commrt.layers.tournament.outcome import Outcome
from commrt.layers.tournament.selection import (
    Consensus,
    Evolution,
    Pairwise,
    Selection,
    Truncation,
)
from commrt.layers.tournament.standing import Judgement, Standing
from commrt.layers.tournament.tournament import Tournament

__all__ = [
    "Consensus",
    "Draws",
    "Evolution",
    "Judgement",
    "Mutation",
    "Outcome",
    "Pairwise",
    "Perturb",
    "Selection",
    "Standing",
    "Tournament",
    "Truncation",
]
