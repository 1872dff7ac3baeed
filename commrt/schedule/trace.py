# SPDX-License-Identifier: Apache-2.0
"""The events of a schedule: when each happens, and with which part of the data.

*When* is a number of messages: a message of column c is the (c+1)-th of the longest
chain that leads to it; a local step of column c runs when c messages are through. Wrong
algorithms are traced, too, as long as their messages match and they end: what is
missing counts as nothing, and what is added twice is not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commrt.schedule.execute import Execution
from commrt.schedule.goals import Content, Goal
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice

__all__ = ["LocalStep", "Message", "Trace", "trace"]

Contents = tuple[Content | None, ...]


@dataclass(frozen=True)
class Message:
    """A send and its receive."""

    column: int
    src: int
    dst: int
    order: int
    """The send's place in the program of its rank."""
    contents: Contents
    """Its payload, block by block."""
    reduces: bool
    """True if the receiver adds it to what it has."""
    ends: tuple[str, str]
    """Its source and destination, as ``out[3]``."""


@dataclass(frozen=True)
class LocalStep:
    """A copy or a reduction within a rank."""

    column: int
    rank: int
    contents: Contents
    """The contents after it."""
    reduces: bool
    ends: tuple[str, str]


@dataclass(frozen=True)
class Trace:
    """All that happens; messages of a rank in the order of its program."""

    num_columns: int
    num_parts: int
    """Parts of the operation's data that have a name of their own."""
    messages: tuple[Message, ...]
    local_steps: tuple[LocalStep, ...]


def trace(schedule: Schedule) -> Trace:
    """Return the events, or raise ScheduleError if messages do not match or wait."""
    programs = schedule.programs()
    memory = _Memory(schedule, programs)
    columns = [[0] * len(program.steps) for program in programs]
    messages, local_steps = [], []

    def ready(rank: int, index: int) -> int:
        """Return the number of messages that must be through before a step can run."""
        deps = programs[rank].steps[index].deps
        return max((columns[rank][dep] for dep in deps), default=0)

    for (rank, index), sender in Execution(programs):
        step, own = programs[rank].steps[index], programs[rank]
        column = columns[rank][index] = ready(rank, index)
        reduces = step.op in (Op.RRED, Op.RED)
        if sender is None:
            moved = memory.read(rank, step.src)
            result = memory.join(rank, step.dst, moved) if reduces else moved
            ends = (own.describe(step.src), own.describe(step.dst))
            local_steps.append(LocalStep(column, rank, result, reduces, ends))
        else:
            src, place = sender
            sent = programs[src].steps[place]
            start = columns[src][place] = ready(src, place)
            columns[rank][index] = max(column, start + 1)
            moved = memory.read(src, sent.src)
            result = memory.join(rank, step.src, moved) if reduces else moved
            ends = (programs[src].describe(sent.src), own.describe(step.dst))
            messages.append(Message(start, src, rank, place, moved, reduces, ends))
        memory.write(rank, step.dst, result)
    return Trace(
        max((one.column + 1 for one in messages), default=0),
        memory.num_parts,
        tuple(sorted(messages, key=lambda one: (one.column, one.src, one.order))),
        tuple(local_steps),
    )


class _Memory:
    """The contents of every block, without complaints."""

    def __init__(self, schedule: Schedule, programs: Sequence[RankProgram]) -> None:
        goal = Goal(schedule.coll, schedule.size, schedule.root)
        self._held: list[list[list[Content | None]]] = []
        parts: set[int] = set()
        for rank, program in enumerate(programs):
            initial = goal.initial(rank, program.spaces[0].nblk)
            parts.update(part for part, _ in initial)
            self._held.append([[*initial]])
            for space in program.spaces[1:]:
                self._held[rank].append([None] * space.nblk)
        self.num_parts = len(parts)

    def read(self, rank: int, where: Slice) -> Contents:
        return tuple(self._held[rank][where.space][where.lo : where.hi])

    def write(self, rank: int, where: Slice, values: Contents) -> None:
        self._held[rank][where.space][where.lo : where.hi] = values

    def join(self, rank: int, own: Slice, moved: Contents) -> Contents:
        pairs = zip(self.read(rank, own), moved, strict=True)
        return tuple(a and b and (a[0], a[1] | b[1]) for a, b in pairs)
