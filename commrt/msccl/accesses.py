# SPDX-License-Identifier: Apache-2.0
"""Accesses of a rank's steps to its blocks: who waits for whom, as a file orders them.

Two steps that touch one block, one of them writing, must not run together. The later
one waits for the earlier one if the file orders the two. Where it does not, neither
waits, so that the verifier finds the race.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from commrt.msccl.waits import Timed
from commrt.schedule.ir import Op, Slice

__all__ = ["Accesses", "Task"]

_BEFORE_ALL = -1
"""The place of copies that come before all thread blocks."""
_MOST_UNORDERED = 64
"""Accesses kept of those that race with a write. The verifier needs two of them."""


@dataclass
class Task:
    """A step of the schedule, before its rank's steps have an order."""

    rank: int
    line: int
    op: Op
    src: Slice | None
    dst: Slice | None
    peer: int = -1
    deps: set[int] = field(default_factory=set)
    partner: int = -1
    """The other end of a message."""


class Access(NamedTuple):
    """A task that reads or writes a block, and its step in the file."""

    task: int
    place: int
    number: int


class Accesses:
    """The accesses to the blocks of one rank that later ones may have to wait for."""

    def __init__(self) -> None:
        self._reads: dict[tuple[int, int], list[Access]] = {}
        self._writes: dict[tuple[int, int], list[Access]] = {}

    def waits(self, task: Task, number: int, by: Timed | None) -> set[int]:
        """Note what a task touches; return the tasks that it comes behind by the file.

        Args:
            task: the task.
            number: its number.
            by: its step in the file; None: it comes before or behind all of them.
        """
        found: set[int] = set()
        reads = [task.src] if task.src else []
        if task.op is Op.RED and task.dst:
            reads.append(task.dst)
        for span, writes in [(each, False) for each in reads] + [(task.dst, True)]:
            if span is None:
                continue
            for block in range(span.lo, span.hi):
                found |= self._touch((span.space, block), number, writes, by)
        return found - {number}

    def _touch(
        self, block: tuple[int, int], number: int, writes: bool, by: Timed | None
    ) -> set[int]:
        reads = self._reads.setdefault(block, [])
        earlier = self._writes.setdefault(block, [])
        place = (_BEFORE_ALL, 0) if by is None else (by.place, by.step.number)
        own = Access(number, *place)
        found = {one.task for one in earlier if _is_ordered(one, by)}
        if not writes:
            reads.append(own)
            return found
        found |= {one.task for one in reads if _is_ordered(one, by)}
        # Whoever comes later comes behind all that is ordered by way of this one.
        for kept in (reads, earlier):
            racing = [one for one in kept if not _is_ordered(one, by)]
            kept[:] = racing[:_MOST_UNORDERED]
        earlier.append(own)
        return found


def _is_ordered(one: Access, by: Timed | None) -> bool:
    if by is None or one.place == _BEFORE_ALL:
        return True
    is_own = (one.place, one.number) == (by.place, by.step.number)
    return is_own or by.comes_after(one.place, one.number)
