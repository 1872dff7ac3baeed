# SPDX-License-Identifier: Apache-2.0
"""Predicted times of schedules whose messages go between nodes without MPI.

The relay that carries them copies nothing (commrt's own connections), or both sides
copy, in threads that share the cores (gloo).
"""

from __future__ import annotations

from dataclasses import replace

from commrt.planning.host_plans import split_params
from commrt.planning.prediction import schedule_us
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import GAMMA, BetweenNodes, Constants
from commrt.vocabulary.operations import operation

__all__ = ["UNMEASURED", "message_constants", "relayed_us", "with_known_lengths"]

UNMEASURED = BetweenNodes(15.0, 5e-4, 65.0, is_staged=False)
"""Cost assumed where nobody measured: for questions without ranks, as in tuner
reports."""
_STAGED = 0.7
"""Bytes of a schedule's messages that gloo carries are copied on both sides, by threads
that share the cores: sums and exchanges of 8 MiB on two pretended nodes take 1.7 times
as long as gloo's own, which copies nothing."""
_STAGED_GAMMA = 10 * GAMMA
"""Cost of reducing what has arrived, by a rank that has to send, too."""
_UNKNOWN_NBYTES = 128 << 10
"""Assumed bytes between a pair of ranks where no rank knows all lengths: between
nodes a wrong choice costs short ones a tenth or two, and long ones two thirds."""


def message_constants(between: BetweenNodes | None, crowd: float = 1.0) -> Constants:
    """Return the cost of a schedule's messages between nodes.

    Args:
        between: as measured; None: a guess.
        crowd: ranks that share a core.
    """
    one = between or UNMEASURED
    if not one.is_staged:
        return Constants(one.alpha_us, one.beta_us, GAMMA)
    beta_us = (1 + _STAGED * crowd) * one.beta_us
    return Constants(one.alpha_us, beta_us, _STAGED_GAMMA)


def with_known_lengths(query: Query) -> Query:
    """Return a query with a length, also where no rank knows all."""
    if operation(query.coll).rule_bytes == "any":
        return replace(query, nbytes=_UNKNOWN_NBYTES)
    return query


def relayed_us(
    facts: CommFacts,
    query: Query,
    candidate: Candidate,
    between: BetweenNodes | None,
    *,
    only_floor: bool = False,
) -> float:
    """Return the modelled microseconds of a schedule for ``query``.

    Args:
        facts: the ranks.
        query: the operation.
        candidate: the schedule.
        between: the cost of messages between nodes, as measured; None: a guess.
        only_floor: whether only what it takes at least is asked for.
    """
    if facts.size == 1:
        return 0.0
    own, _ = split_params(candidate.params)
    one = message_constants(between, facts.crowd)
    asked = with_known_lengths(query)
    return schedule_us(facts, asked, candidate.algorithm, own, one, only_floor)
