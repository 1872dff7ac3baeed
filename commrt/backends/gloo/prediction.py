# SPDX-License-Identifier: Apache-2.0
"""What gloo is predicted to take: its messages in a schedule, or its own collective."""

from __future__ import annotations

import math
from dataclasses import replace

from commrt.planning.host_plans import split_params
from commrt.planning.prediction import schedule_us
from commrt.schedule.cost import OnNode
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import (
    COMPARED,
    COMPARED_NBYTES,
    NATIVE_GLOO,
    BetweenNodes,
    gloo_constants,
)
from commrt.vocabulary.operations import operation

__all__ = ["predicted_us"]

_UNKNOWN_NBYTES = 128 << 10
"""What a pair of ranks is taken to exchange where no rank knows all lengths: between
nodes a wrong choice costs short ones a tenth or two, and long ones two thirds."""


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
    if operation(query.coll).rule_bytes == "any":
        query = replace(query, nbytes=_UNKNOWN_NBYTES)
    if candidate.algorithm != "native":
        own, _ = split_params(candidate.params)
        crowd = max(1.0, facts.ppn / facts.cores)
        one = gloo_constants(between, native=False, crowd=crowd)
        return schedule_us(facts, query, candidate.algorithm, own, one, only_floor)
    run = NATIVE_GLOO.get(query.coll)
    if run is None:
        return math.inf
    one = gloo_constants(between, native=True)
    start_us = one.alpha_us
    if not operation(query.coll).is_empty:
        start_us += _comparing_us(facts, between, only_floor)
    one = replace(one, beta_us=run.copies * one.beta_us)
    # Of what ranks of a node send each other gloo makes no difference.
    same = OnNode(facts.layout, 1.0, 1.0) if facts.ppn > 1 else None
    asked = replace(query, coll=run.coll)
    return start_us + schedule_us(
        facts, asked, run.algorithm, {}, one, only_floor, nearby=same
    )


def _comparing_us(
    facts: CommFacts, between: BetweenNodes | None, only_floor: bool
) -> float:
    """Return what ranks take to compare what they have called."""
    short = Query(COMPARED.coll, COMPARED_NBYTES, "int64", op="max")
    one = gloo_constants(between, native=False)
    return schedule_us(facts, short, COMPARED.algorithm, {}, one, only_floor)
