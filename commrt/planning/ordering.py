# SPDX-License-Identifier: Apache-2.0
"""Candidates whose order suits a reduction, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from commrt import algorithms
from commrt.errors import ScheduleError, UsageError
from commrt.planning.footprint import Own
from commrt.planning.host_plans import lowered_programs, node_numbers, split_params
from commrt.planning.spec import Ranks
from commrt.schedule.nodes import Nodes
from commrt.schedule.order import Order, check_order
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.reductions import Reduction

__all__ = ["wanted_order", "why_refused"]

_NEEDS: Mapping[Order, str] = {
    "rank": "the reduction is not commutative",
    "left": "deterministic=True asks for one order",
    "once": "deterministic=True asks for one order and one rounding",
}


_ROUNDS = ("sum", "avg", "prod", "premul_sum")


def wanted_order(
    deterministic: bool, op: str, user: Reduction | None, dtype: str
) -> Order:
    """Return in which order the operands of a reduction must meet.

    Args:
        deterministic: whether results must not depend on the algorithm.
        op: commrt's reduction, where ``user`` is None.
        user: the user's own.
        dtype: name of the element type.
    """
    if user is not None:
        if deterministic:
            return "left"
        return "any" if user.commutative else "rank"
    kind = dtype_by_name(dtype)
    # Integers wrap, and min and max choose: there every order gives the same.
    if not deterministic or op not in _ROUNDS or kind.kind not in ("float", "complex"):
        return "any"
    return "once" if kind.is_short_float else "left"


def why_refused(
    group: Ranks, query: Query, candidate: Candidate, *, rounds_at_each_step: bool
) -> str | None:
    """Return why ``candidate`` must not run ``query``; the same on every rank.

    The verifier says so of the very programs that would run on these ranks: no list of
    algorithms is kept. ``rounds_at_each_step``: kernels of a device run them, which add
    two operands at a time.
    """
    if query.order == "any":
        return None
    needs = _NEEDS[query.order]
    if query.order == "once" and rounds_at_each_step:
        return f"{needs}, and its kernels add two operands at a time"
    if not algorithms.exists(query.coll, candidate.algorithm):
        return f"{needs}, and it is no schedule whose order could be proved"
    try:
        own, _ = split_params(candidate.params)
        reason = _reason(
            query.coll,
            candidate.algorithm,
            query.root or 0,
            tuple(sorted(own.items())),
            node_numbers(group),
            query.order,
        )
    except UsageError:
        return None  # wrong parameters: planning says what is wrong with them
    return None if reason is None else f"{needs}: {reason}"


@lru_cache(maxsize=1024)
def _reason(
    coll: str,
    algorithm: str,
    root: int,
    params: Own,
    nodes: Nodes,
    wanted: Order,
) -> str | None:
    schedule = algorithms.schedule(
        coll, algorithm, len(nodes), root, dict(params), nodes
    )
    lowered = lowered_programs(coll, algorithm, root, params, nodes)
    try:
        check_order(schedule, lowered, wanted)
    except ScheduleError as error:
        return str(error)
    return None
