# SPDX-License-Identifier: Apache-2.0
"""Prove what the engine runs: lowered programs, fragments in flight, finite resources.

The same promises as ``verify``, under the rules of ``engine_model``: it ends, touches
no block unordered, counts every contribution once and reaches the goal, in place and
out of place, with the given message lines and one fragment's payload slots per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commrt import _native
from commrt.errors import ScheduleError
from commrt.schedule.columns import RULES, lowered_programs, operation_goal
from commrt.schedule.engine_model import LINES, run_engine
from commrt.schedule.faults import of_contents
from commrt.schedule.ir import Schedule
from commrt.schedule.lower import LOCAL, Lowered, lower
from commrt.schedule.verify import race

__all__ = ["verify_lowered"]


def verify_lowered(
    schedule: Schedule,
    *,
    fragments: int = 3,
    lines: int = LINES,
    can_fuse: Callable[[int, int], bool] = lambda rank, peer: True,
) -> None:
    """Lower ``schedule`` for all ranks and check the result, or raise ScheduleError.

    Args:
        schedule: what to lower.
        fragments: how many fragments to run.
        lines: message lines per ordered pair of ranks.
        can_fuse: whether a rank's sends to a peer may be fused.
    """
    lowered = [
        lower(schedule, rank, lambda peer, rank=rank: can_fuse(rank, peer))  # type: ignore[misc]
        for rank in range(schedule.size)
    ]
    programs = lowered_programs(lowered)
    rule = RULES[schedule.redop_class]
    try:
        try:
            programs.check()
            order = run_engine(programs, fragments, lines)
            programs.check_meaning(order, operation_goal(schedule), rule)
        except _native.ScheduleFaultError as fault:
            raise ScheduleError(_said(lowered, fault)) from None
    except ScheduleError as exc:
        raise ScheduleError(
            f"{schedule.coll} {schedule.algorithm} on {schedule.size} ranks, lowered: "
            f"{exc}"
        ) from exc


def _said(lowered: Sequence[Lowered], fault: _native.ScheduleFaultError) -> str:
    """Return what the native checks found wrong, in words."""
    kind, numbers, contents = fault.args
    if kind == "ends":
        return of_contents(kind, numbers, contents)
    rank, *others = numbers
    if kind == "counts":
        peer, sent, received = others
        return (
            f"rank {rank} sends {sent} messages to rank {peer}, which receives "
            f"{received}; every send needs one receive"
        )
    if kind == "uses":
        return _uses(lowered[rank], inputs=bool(others[0]))
    if kind == "race":
        one, other = (f"rank {rank} instruction {index}" for index in others)
        return race(one, other)
    fragment, index, *rest = others
    return (
        f"rank {rank} fragment {fragment} instruction {index}: "
        f"{of_contents(kind, rest, contents)}"
    )


def _uses(one: Lowered, *, inputs: bool) -> str:
    table = one.inputs if inputs else one.outputs
    counts = one.messages_in if inputs else one.messages_out
    used = sorted((row[1], row[2]) for row in table.tolist() if row[0] != LOCAL)
    wanted = sorted((peer, k) for peer, n in counts.items() for k in range(n))
    return f"rank {one.rank} uses messages {used}, expected {wanted}, each once"
