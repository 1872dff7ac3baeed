# SPDX-License-Identifier: Apache-2.0
"""What a candidate is predicted to take: the prior of the tuner, the default choice."""

from __future__ import annotations

import math
import warnings
from typing import Any

from commrt import algorithms
from commrt.backends.planning import split_params
from commrt.schedule.cost import cost
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import Transport, constants

__all__ = ["predicted_us"]


def predicted_us(facts: CommFacts, query: Query, candidate: Candidate) -> float:
    """Return the modelled microseconds of ``candidate`` for ``query``.

    The library's own collective is taken to be as good as the best schedule would be
    over MPI's messages; a third party's backend is taken to be like it.
    """
    if facts.size == 1:
        return 0.0
    on_node = facts.nodes == 1 and candidate.algorithm != "native"
    transport: Transport = "shm" if on_node else "mpi"
    known = algorithms.names(query.coll)
    if candidate.algorithm in known:
        own, _ = split_params(candidate.params)
        return _schedule_us(facts, query, candidate.algorithm, own, transport)
    return min(
        _schedule_us(facts, query, name, {}, transport)
        for name in algorithms.names(query.coll, facts.size)
    )


def _schedule_us(
    facts: CommFacts,
    query: Query,
    name: str,
    params: dict[str, Any],
    transport: Transport,
) -> float:
    one = constants(facts.link_class, transport)
    full = full_nbytes(query, facts.size)
    try:
        schedule = algorithms.schedule(
            query.coll, name, facts.size, query.root or 0, params
        )
        return cost(schedule, full, one.alpha_us, one.beta_us, one.gamma_us)
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


def full_nbytes(query: Query, size: int) -> int:
    """Return the bytes of the full vector: the inverse of ``rule_nbytes``."""
    from commrt.operations import operation

    whole = operation(query.coll).rule_bytes == "whole"
    return query.nbytes if whole else query.nbytes * size
