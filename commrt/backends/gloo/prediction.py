# SPDX-License-Identifier: Apache-2.0
"""Predicted times of gloo: messages of a schedule, or its own collective."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from commrt.backends.relayed import (
    UNMEASURED,
    message_constants,
    relayed_us,
    with_known_lengths,
)
from commrt.planning.prediction import schedule_us
from commrt.schedule.cost import OnNode
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import GAMMA, BetweenNodes, Constants

__all__ = [
    "COMPARED",
    "COMPARED_NBYTES",
    "NATIVE_GLOO",
    "NativeRun",
    "native_constants",
    "predicted_us",
]


@dataclass(frozen=True)
class NativeRun:
    """A schedule with the messages of gloo's own collective."""

    coll: str
    """Operation whose schedule stands for gloo's own."""
    algorithm: str
    """The algorithm of that schedule."""
    copies: float = 1.0
    """Times of the bytes that it moves: torch copies what gloo returns in another form,
    or reduces more than is asked for."""


NATIVE_GLOO = {
    "allreduce": NativeRun("allreduce", "ring"),
    "reduce": NativeRun("allreduce", "ring"),
    "bcast": NativeRun("bcast", "binomial"),
    "allgather": NativeRun("allgather", "ring", 1.9),
    "reduce_scatter": NativeRun("allreduce", "ring", 1.5),
    "alltoall": NativeRun("alltoall", "pairwise"),
    "gather": NativeRun("gather", "direct"),
    "scatter": NativeRun("scatter", "direct"),
    "barrier": NativeRun("barrier", "dissemination"),
}
"""gloo's own collectives that are chosen unasked, by operation. The lengths of an
alltoallv cannot be compared, as no rank knows all. So it runs only if asked for."""


COMPARED = NativeRun("allreduce", "recursive_doubling")
"""The schedule by which ranks compare their calls, before gloo runs them."""
COMPARED_NBYTES = 16


def native_constants(between: BetweenNodes | None) -> Constants:
    """Return the cost of messages of gloo's own collectives.

    ``between`` is what was measured; None: a guess.
    """
    one = between or UNMEASURED
    return Constants(one.native_us, one.beta_us, GAMMA)


def predicted_us(
    facts: CommFacts,
    query: Query,
    candidate: Candidate,
    between: BetweenNodes | None,
    *,
    only_floor: bool = False,
) -> float:
    """Return the modelled microseconds of a candidate of gloo's for ``query``.

    Args:
        facts: the ranks.
        query: the operation.
        candidate: a schedule, or gloo's own collective.
        between: what messages of gloo cost, as measured; None: a guess.
        only_floor: whether only what it takes at least is asked for.
    """
    if facts.size == 1:
        return 0.0
    if candidate.algorithm != "native":
        return relayed_us(facts, query, candidate, between, only_floor=only_floor)
    query = with_known_lengths(query)
    run = NATIVE_GLOO.get(query.coll)
    if run is None:
        return math.inf
    one = native_constants(between)
    start_us = one.alpha_us + _comparing_us(facts, between, only_floor)
    one = replace(one, beta_us=run.copies * one.beta_us)
    # gloo makes no difference between messages on a node and messages between nodes.
    same = OnNode(facts.layout, 1.0, 1.0) if facts.ppn > 1 else None
    asked = replace(query, coll=run.coll)
    return start_us + schedule_us(
        facts, asked, run.algorithm, {}, one, only_floor, nearby=same
    )


def _comparing_us(
    facts: CommFacts, between: BetweenNodes | None, only_floor: bool
) -> float:
    """Return the time in which ranks compare what they have called."""
    short = Query(COMPARED.coll, COMPARED_NBYTES, "int64", op="max")
    one = message_constants(between)
    return schedule_us(facts, short, COMPARED.algorithm, {}, one, only_floor)
