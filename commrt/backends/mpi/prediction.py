# SPDX-License-Identifier: Apache-2.0
"""Predicted times of MPI between nodes, from what ranks measured when they met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commrt import algorithms
from commrt.planning.host_plans import split_params
from commrt.planning.prediction import schedule_us
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import (
    GAMMA,
    Constants,
    MpiBetweenNodes,
    cheapest,
)

__all__ = ["best_schedule", "calibrated", "predicted_us"]

_GAMMA = 2 * GAMMA
_MOST_FACTOR, _STEPS = 16.0, 12
"""Most that bytes may cost more in schedules than alone; what is beyond is disturbance.
They may cost a quarter, since fragments overlap."""


def predicted_us(
    facts: CommFacts,
    query: Query,
    candidate: Candidate,
    between: MpiBetweenNodes,
    *,
    carried: MpiBetweenNodes | None = None,
    only_floor: bool = False,
) -> float:
    """Return the modelled microseconds of a candidate of MPI's for ``query``.

    The library's own collective takes its measured part of what the best schedule is
    predicted to take.

    Args:
        facts: the ranks.
        query: the operation.
        candidate: a schedule, or the library's own collective.
        between: what was measured.
        carried: costs of the messages of schedules, where MPI does not carry them.
        only_floor: whether only what it takes at least is asked for.
    """
    if facts.size == 1:
        return 0.0
    if candidate.algorithm != "native":
        return _schedule_us(facts, query, candidate, between, only_floor)
    among = _by_name(facts, query)
    part = between.native_part(
        query.coll,
        query.nbytes,
        lambda ranks, nbytes: _elsewhere_us(ranks, query, nbytes, between),
    )
    costs = carried or between
    if only_floor:
        return part * min(_schedule_us(facts, query, one, costs, True) for one in among)
    return part * best_schedule(facts, query, among, costs)[1]


def _elsewhere_us(
    facts: CommFacts, query: Query, nbytes: int, between: MpiBetweenNodes
) -> float:
    """Return what the best schedule takes on other ranks, for other lengths."""
    asked = replace(query, nbytes=nbytes)
    return best_schedule(facts, asked, _by_name(facts, query), between)[1]


def calibrated(
    facts: CommFacts,
    between: MpiBetweenNodes,
    short: tuple[Query, Candidate, float],
    long: tuple[Query, Candidate, float],
) -> MpiBetweenNodes:
    """Return costs with which two schedules are predicted to take what they took.

    Messages of a schedule cost more than messages alone, by what the engine does for
    each, and by ranks that wait for each other.

    Args:
        facts: the ranks.
        between: costs of messages alone.
        short: query, schedule and microseconds of one whose messages count.
        long: the same of one whose bytes count.
    """

    most_us = _MOST_FACTOR * between.beta_us
    found = between
    # Costs on a node are a part of those between nodes: no closed form has both.
    for _ in range(_STEPS):
        alpha_us = found.alpha_us * _took_longer(facts, short, found)
        found = replace(found, alpha_us=max(alpha_us, between.alpha_us))
        beta_us = found.beta_us * _took_longer(facts, long, found)
        found = replace(found, beta_us=min(max(beta_us, most_us / 64), most_us))
    return found


def _took_longer(
    facts: CommFacts, at: tuple[Query, Candidate, float], between: MpiBetweenNodes
) -> float:
    query, one, took_us = at
    return took_us / _schedule_us(facts, query, one, between, False)


def _by_name(facts: CommFacts, query: Query) -> list[Candidate]:
    """Return the schedules that ask for no nodes, as libraries may have them."""
    names = algorithms.names(query.coll, facts.size)
    return [Candidate("mpi", name) for name in names]


def best_schedule(
    facts: CommFacts,
    query: Query,
    schedules: Sequence[Candidate],
    between: MpiBetweenNodes,
) -> tuple[Candidate, float]:
    """Return the schedule that is predicted to be the quickest, and its time."""
    return cheapest(
        schedules,
        lambda one: _schedule_us(facts, query, one, between, False),
        lambda one: _schedule_us(facts, query, one, between, True),
    )


def _schedule_us(
    facts: CommFacts,
    query: Query,
    candidate: Candidate,
    between: MpiBetweenNodes,
    only_floor: bool,
) -> float:
    own, _ = split_params(candidate.params)
    prices = Constants(between.alpha_us, between.beta_us, _GAMMA)
    return schedule_us(facts, query, candidate.algorithm, own, prices, only_floor)
