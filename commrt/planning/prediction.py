# SPDX-License-Identifier: Apache-2.0
"""Predicted times of candidates: the tuner's prior and the default choice."""

from __future__ import annotations

import math
import warnings
from typing import Any

from commrt import algorithms
from commrt.planning.host_plans import split_params
from commrt.schedule.core_cost import core_cost, core_floor
from commrt.schedule.cost import OnNode, cost, counts, floor
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import Carrier, Constants, cheapest, constants
from commrt.vocabulary.operations import operation

__all__ = ["floor_us", "full_nbytes", "predicted_us", "schedule_us"]


def predicted_us(
    facts: CommFacts,
    query: Query,
    candidate: Candidate,
) -> float:
    """Return the modelled microseconds of ``candidate`` for ``query``.

    MPI's own collective is taken to be as good as the best schedule would be over its
    messages; a third party's backend is taken to be like it.
    """
    if facts.size == 1:
        return 0.0
    return _predicted(facts, query, candidate, only_floor=False)


def floor_us(
    facts: CommFacts,
    query: Query,
    candidate: Candidate,
) -> float:
    """Return a lower bound of ``predicted_us``, found from a few ranks' programs."""
    if facts.size == 1:
        return 0.0
    return _predicted(facts, query, candidate, only_floor=True)


def _predicted(
    facts: CommFacts,
    query: Query,
    candidate: Candidate,
    only_floor: bool,
) -> float:
    if algorithms.exists(query.coll, candidate.algorithm):
        own, _ = split_params(candidate.params)
        on_node = facts.nodes == 1 and candidate.algorithm != "native"
        carrier: Carrier = "memory" if on_node else "messages"
        one = constants(facts.link_class, carrier)
        return schedule_us(
            facts, query, candidate.algorithm, own, one, only_floor, shares=on_node
        )

    def by(name: str, only_floor: bool) -> float:
        one = constants(facts.link_class, "messages")
        return schedule_us(facts, query, name, {}, one, only_floor, shares=False)

    known = algorithms.names(query.coll, facts.size)
    if only_floor:
        return min(by(name, True) for name in known)
    return cheapest(known, lambda name: by(name, False), lambda name: by(name, True))[1]


def schedule_us(
    facts: CommFacts,
    query: Query,
    name: str,
    params: dict[str, Any],
    one: Constants,
    only_floor: bool,
    *,
    shares: bool = False,
    nearby: OnNode | None = None,
) -> float:
    """Return the time of a schedule if messages between nodes cost so much.

    Args:
        facts: where it runs.
        query: the operation.
        name: the algorithm.
        params: its parameters.
        one: costs between nodes; on one node, those there.
        only_floor: whether only what it takes at least is asked for.
        shares: on one node, whether ranks read each other's memory.
        nearby: what messages on a node cost beside those; None: what they do by
            shared memory.
    """
    root = query.root or 0
    prices = full_nbytes(query, facts.size), one.alpha_us, one.beta_us, one.gamma_us
    try:
        schedule = algorithms.schedule(
            *(query.coll, name, facts.size, root, params, facts.layout)
        )
        # The root, its neighbours, and two that are far from it.
        few = {(root + far) % facts.size for far in (0, 1, -1, facts.size // 2)}
        if facts.nodes > 1:
            on_node = nearby or _on_node(facts, one)
            if only_floor:
                return floor(schedule, few, *prices, on_node)
            return cost(schedule, *prices, on_node, facts.crowd)
        if not (only_floor or algorithms.get(query.coll, name).built_in):
            counts(schedule)  # raises where ranks would wait for each other
        here: Any = {"shares": shares, "crowd": facts.crowd}
        if only_floor:
            return core_floor(schedule, few, *prices, **here)
        return core_cost(schedule, *prices, **here)
    except Exception as error:
        if algorithms.get(query.coll, name).built_in:
            raise
        # A third party's mistake must not take the others' default choice with it.
        warnings.warn(
            f"{query.coll} algorithm {name!r} is left out for {facts.size} ranks: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return math.inf


def _on_node(facts: CommFacts, between: Constants) -> OnNode | None:
    """Return the cost of messages on a node, compared with those between nodes."""
    if facts.ppn == 1:
        return None
    crowd = facts.crowd
    here = constants("near" if crowd == 1 else "oversubscribed", "memory")
    return OnNode(
        facts.layout,
        min(1.0, crowd * here.alpha_us / between.alpha_us),
        min(1.0, crowd * here.beta_us / between.beta_us),
    )


def full_nbytes(query: Query, size: int) -> int:
    """Return the bytes of the full vector: the inverse of ``rule_nbytes``."""
    whole = operation(query.coll).rule_bytes == "whole"
    return query.nbytes if whole else query.nbytes * size
