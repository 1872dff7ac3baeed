# SPDX-License-Identifier: Apache-2.0
"""Predicted times of gloo: messages of a schedule, or its own collective."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from commrt.planning.host_plans import split_params
from commrt.planning.prediction import schedule_us
from commrt.schedule.cost import OnNode
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import GAMMA, BetweenNodes, Constants
from commrt.vocabulary.operations import operation

__all__ = [
    "COMPARED",
    "COMPARED_NBYTES",
    "NATIVE_GLOO",
    "NativeRun",
    "gloo_constants",
    "predicted_us",
]

UNMEASURED = BetweenNodes(15.0, 5e-4, 65.0, is_staged=False)
"""Cost assumed where nobody measured: for questions without ranks, as in tuner
reports."""
_STAGED = 0.7
"""Bytes of a schedule's messages that gloo carries are copied on both sides, by threads
that share the cores: sums and exchanges of 8 MiB on two pretended nodes take 1.7 times
as long as gloo's own, which copies nothing."""
_STAGED_GAMMA = 10 * GAMMA
"""Cost of reducing what has arrived, by a rank that has to send, too."""


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


def gloo_constants(
    between: BetweenNodes | None, native: bool, crowd: float = 1.0
) -> Constants:
    """Return the cost of messages between nodes, of schedules or of gloo's collectives.

    Connections of commrt's own copy nothing but what the kernel does.

    Args:
        between: as measured; None: a guess.
        native: whether they are those of gloo's own collectives.
        crowd: ranks that share a core.
    """
    one = between or UNMEASURED
    if native:
        return Constants(one.native_us, one.beta_us, GAMMA)
    if not one.is_staged:
        return Constants(one.alpha_us, one.beta_us, GAMMA)
    beta_us = (1 + _STAGED * crowd) * one.beta_us
    return Constants(one.alpha_us, beta_us, _STAGED_GAMMA)


_UNKNOWN_NBYTES = 128 << 10
"""Assumed bytes between a pair of ranks where no rank knows all lengths: between
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
    one = gloo_constants(between, native=False)
    return schedule_us(facts, short, COMPARED.algorithm, {}, one, only_floor)
