# SPDX-License-Identifier: Apache-2.0
"""Prove what the engine runs: lowered programs, fragments in flight, finite resources.

The same promises as ``verify``, under the rules of ``engine_model``: it ends, touches
no block unordered, counts every contribution once and reaches the goal, in place and
out of place, with the given message lines and one fragment's payload slots per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commrt.errors import ScheduleError
from commrt.schedule.engine_model import LINES, EngineModel
from commrt.schedule.goals import Content, Goal
from commrt.schedule.ir import RedopClass, Schedule, Slice
from commrt.schedule.lower import LOCAL, Entry, Lowered, lower
from commrt.schedule.verify import SymbolicMemory, check_races, combine
from commrt.vocabulary.operations import operation

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
    try:
        _check_counts(lowered)
        for one in lowered:
            _check_own(one)
        _check_run(schedule, lowered, fragments, lines)
    except ScheduleError as exc:
        raise ScheduleError(
            f"{schedule.coll} {schedule.algorithm} on {schedule.size} ranks, lowered: "
            f"{exc}"
        ) from exc


def _check_counts(lowered: Sequence[Lowered]) -> None:
    for one in lowered:
        for peer, count in one.messages_out.items():
            expected = lowered[peer].messages_in.get(one.rank, 0)
            if count != expected:
                raise ScheduleError(
                    f"rank {one.rank} sends {count} messages to rank {peer}, which "
                    f"receives {expected}; every send needs one receive"
                )


def _check_own(one: Lowered) -> None:
    """Check one rank: each message used once, no race."""
    for table, counts in (
        (one.inputs, one.messages_in),
        (one.outputs, one.messages_out),
    ):
        used = sorted((row[1], row[2]) for row in table.tolist() if row[0] != LOCAL)
        wanted = sorted((peer, k) for peer, n in counts.items() for k in range(n))
        if used != wanted:
            raise ScheduleError(
                f"rank {one.rank} uses messages {used}, expected {wanted}, each once"
            )
    indices = range(len(one))
    check_races(
        one.spaces,
        [(_locals(one.inputs_of(i)), _locals(one.outputs_of(i))) for i in indices],
        [one.deps_of(i) for i in indices],
        lambda index: f"rank {one.rank} instruction {index}",
    )


def _locals(entries: Sequence[Entry]) -> list[Slice]:
    return [Slice(*entry[1:]) for entry in entries if entry[0] == LOCAL]


class _Symbolic:
    """The contents of all ranks' memory and messages, for one fragment each."""

    def __init__(
        self,
        schedule: Schedule,
        lowered: Sequence[Lowered],
        fragments: int,
        alias: bool,
    ) -> None:
        self.goal = Goal(schedule.coll, schedule.size, schedule.root)
        self.redop_class: RedopClass = schedule.redop_class
        spaces = [one.spaces for one in lowered]
        self.memories = [
            SymbolicMemory(self.goal, spaces, in_place=alias) for _ in range(fragments)
        ]
        self.messages: dict[tuple[int, int, int, int], list[Content]] = {}

    def run(self, one: Lowered, fragment: int, index: int) -> None:
        """Carry out one instruction."""
        memory = self.memories[fragment]
        value: list[Content] = []
        for number, (kind, a, b, c) in enumerate(one.inputs_of(index)):
            if kind == LOCAL:
                operand = memory.read(one.rank, Slice(a, b, c))
            else:
                operand = self.messages.pop((fragment, a, one.rank, b))
            if number:
                operand = combine(
                    value, operand, self.redop_class, idempotent=self.goal.idempotent
                )
            value = operand
        for kind, a, b, c in one.outputs_of(index):
            if kind == LOCAL:
                memory.write(one.rank, Slice(a, b, c), value)
            else:
                self.messages[fragment, one.rank, a, b] = value


def _check_run(
    schedule: Schedule, lowered: Sequence[Lowered], fragments: int, lines: int
) -> None:
    modes = (False, True) if operation(schedule.coll).in_place else (False,)
    symbolic = [_Symbolic(schedule, lowered, fragments, mode) for mode in modes]
    for rank, fragment, index in EngineModel(lowered, fragments, lines):
        for one in symbolic:
            try:
                one.run(lowered[rank], fragment, index)
            except ScheduleError as exc:
                raise ScheduleError(
                    f"rank {rank} fragment {fragment} instruction {index}: {exc}"
                ) from exc
    for one in symbolic:
        for memory in one.memories:
            for rank in range(schedule.size):
                memory.check(one.goal, rank)
