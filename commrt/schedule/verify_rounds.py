# SPDX-License-Identifier: Apache-2.0
"""Prove what streams of devices run: rounds that are closed, and what they compute.

``verify_rounds`` lowers a schedule to rounds (``rounds.py``), lays fragments over each
other as they are run, and checks of what all ranks have then, knowing nothing of how it
was made:

- *closed* (C3c): in each group the messages from one rank to another are, at both ends,
  the same ones in the same order, as the library matches them by order alone, and
  equally long for every vector;
- *in order*: all ranks run their groups in one order, so none waits in a group for
  what another one has put into a later one;
- *small enough*: no group is larger than its shape allows (docs/internals/nccl.md);
- *undisturbed*: within a group nothing is received where something else is received or
  sent from, also where the operation works in place;
- *meaning*: run group by group, every contribution is in the result exactly once, in
  place and out of place; nothing is read before it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commrt import _native
from commrt.errors import ScheduleError
from commrt.nccl.config import GroupShape
from commrt.schedule.columns import RULES, operation_goal
from commrt.schedule.faults import of_contents
from commrt.schedule.ir import Schedule
from commrt.schedule.rounds import (
    RankRounds,
    Rows,
    Step,
    lower_to_rounds,
    rows_of,
    sequence_rows,
)

__all__ = ["RoundsReport", "check_rounds", "verify_rounds"]

_FRAGMENTS = 3


@dataclass(frozen=True)
class RoundsReport:
    """Costs of rounds."""

    num_rounds: int
    """Number of rounds of one fragment."""
    most_calls: int
    """Sends and receives of the largest group."""
    slots: int
    """Scratch places of the rank that has most, in one fragment."""


def verify_rounds(
    schedule: Schedule,
    *,
    fragments: int = _FRAGMENTS,
    lag: int = 1,
    shape: GroupShape | None = None,
) -> RoundsReport:
    """Lower ``schedule`` to rounds on all ranks and check them, or raise ScheduleError.

    Args:
        schedule: what to lower.
        fragments: how many fragments to lay over each other.
        lag: rounds from one fragment to the next.
        shape: how large groups may be.
    """
    shape = shape or GroupShape.of(schedule.size)
    try:
        rounds = lower_to_rounds(schedule)
        once = _rows(rounds, 1, 1, shape)
        report = _check(schedule, rounds, once, shape)
        if fragments > 1:
            rows = _rows(rounds, fragments, lag, shape)
            _check(schedule, rounds, rows, shape, once)
    except ScheduleError as exc:
        raise ScheduleError(
            f"{schedule.coll} {schedule.algorithm} on {schedule.size} ranks, in "
            f"rounds: {exc}"
        ) from exc
    return report


def _rows(
    rounds: Sequence[RankRounds], fragments: int, lag: int, shape: GroupShape
) -> list[Rows]:
    return [
        sequence_rows(own, len(rounds), fragments=fragments, lag=lag, shape=shape)
        for own in rounds
    ]


def check_rounds(
    schedule: Schedule,
    rounds: Sequence[RankRounds],
    steps: Sequence[Sequence[Step]],
    shape: GroupShape,
    once: Sequence[Sequence[Step]] = (),
) -> RoundsReport:
    """Check what all ranks run, in their order, or raise ScheduleError.

    Args:
        schedule: what is to be reached.
        rounds: the rounds of all ranks.
        steps: what each rank runs.
        shape: how large groups may be.
        once: what each rank runs for one fragment, if that passed this check: fragments
            that do the same need no run of their own.
    """
    rows, known = ([rows_of(own) for own in each] for each in (steps, once))
    return _check(schedule, rounds, rows, shape, known)


def _check(
    schedule: Schedule,
    rounds: Sequence[RankRounds],
    rows: Sequence[Rows],
    shape: GroupShape,
    once: Sequence[Rows] = (),
) -> RoundsReport:
    # Kernels take their operands in any order.
    rule = RULES["none" if schedule.redop_class == "none" else "commutative"]
    try:
        most_calls = rounds[0].all_rounds.check(
            rows,
            distances=shape.distances,
            messages=shape.messages,
            goal=operation_goal(schedule),
            rule=rule,
            once=once,
        )
    except _native.ScheduleFaultError as fault:
        raise ScheduleError(_said(schedule, rows, shape, fault)) from None
    return RoundsReport(
        num_rounds=max(own.num_rounds for own in rounds),
        most_calls=most_calls,
        slots=max(own.num_slots for own in rounds),
    )


def _said(
    schedule: Schedule,
    rows: Sequence[Rows],
    shape: GroupShape,
    fault: _native.ScheduleFaultError,
) -> str:
    """Return what the native check found wrong, in words."""
    kind, numbers, contents = fault.args
    if kind in _SHORT:
        return _SHORT[kind].format(*numbers)
    if kind == "ends":
        return of_contents(kind, numbers, contents)
    if kind == "falling":
        rank = numbers[0]
        keys = [(row[1], row[2]) for row in rows[rank].tolist() if row[0] == 0]
        return (
            f"rank {rank} runs its groups in the order {keys}; expected (round, part) "
            f"to rise"
        )
    if kind == "not closed":
        return _not_closed(numbers)
    if kind == "large":
        number, part, rank, is_recv, peers, many = numbers
        return (
            f"round {number} part {part} of rank {rank} has "
            f"{'receives' if is_recv else 'sends'} for {peers} ranks, up to {many} for "
            f"one; a group takes {shape.distances} and {shape.messages}"
        )
    rank, fragment, does, number, part, *rest = numbers
    said = of_contents(kind, rest, contents)
    if does < 0:
        where = f"send in round {(number, part)}"
    else:
        before = None if number < 0 else (number, part)
        where = f"{'reduce' if does else 'copy'} before round {before}"
        if before is None:
            where = f"{'reduce' if does else 'copy'} behind the last round"
    return f"rank {rank} fragment {fragment}, {where}: {said}"


_SHORT = {
    "disturbed": "round {0} of rank {1}: message {2} from rank {3} comes where the "
    "same group sends from or receives",
    "length": "round {0}: message {1} from rank {2} to rank {3} has another length "
    "there, for some vectors; both ends need the same",
    "never": "rank {0} never comes to round {1}",
    "work": "rank {0} step {1} works on places of different lengths",
    "row": "rank {0} step {1} names a rank, fragment or place that there is not",
}


def _not_closed(numbers: Sequence[int]) -> str:
    number, part, source, target, *left = numbers
    ends = []
    for _ in range(2):
        count, left = left[0], left[1:]
        ends.append([(left[i], left[i + 1]) for i in range(0, 2 * count, 2)])
        left = left[2 * count :]
    return (
        f"round {number} part {part} is not closed: rank {source} sends messages "
        f"{ends[0]} (fragment, number) to rank {target}, which receives {ends[1]} in it"
    )
