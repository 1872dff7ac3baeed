# SPDX-License-Identifier: Apache-2.0
"""Closed rounds of messages, made of a schedule, with local work between them.

A stream of a device runs one thing after the other, and a group of NCCL's sends and
receives ends only when all of its messages have moved. So what a stream can run is a
list of *rounds*: a group of messages, then copies and reductions of local memory. The
groups must be *closed*: both ends of a message are in the same round. Then no rank
waits in one round for what another rank has put into a later one, and by induction
every round ends on every rank (check C3c, ``verify_rounds.py``).

The round of a message is the earliest one in which its value is there: one more than
the last round that its sender had to wait for. Its receiver follows, so rounds are
the longest path through the instructions of all ranks, and both ends know them
without talking.

An instruction ``out = a ⊕ b ⊕ …`` becomes work of at most two operands, as kernels have
it: ``dst = src`` and ``dst = dst ⊕ src``. A message goes straight to where it is
wanted if nothing of its round is in the way, else to a *slot* of scratch memory. That
``dst`` and ``src`` may change places needs a reduction that commutes, as all of a
device's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from commrt import _native
from commrt.errors import ScheduleError
from commrt.nccl.config import GroupShape
from commrt.schedule.columns import lowered_programs
from commrt.schedule.ir import Schedule, Slice, Space
from commrt.schedule.lower import lower

__all__ = [
    "Group",
    "Message",
    "Place",
    "RankRounds",
    "Rows",
    "Slot",
    "Step",
    "Work",
    "lower_to_rounds",
    "rows_of",
    "sequence",
    "sequence_rows",
]

Rows = npt.NDArray[np.int32]
"""A stream's program: a group's row is followed by those of its messages."""


class Slot(NamedTuple):
    """Scratch memory of one fragment: what a message brings, or a partial result."""

    number: int
    """Number in the rank's program; a message or a copy writes each slot once."""
    like: Slice
    """Slice of the same length."""


Place = Slice | Slot


class Message(NamedTuple):
    """One end of a message."""

    peer: int
    k: int
    """The k-th from that sender to that receiver, in a fragment."""
    place: Place
    """The slice that is sent, or that receives."""


class Work(NamedTuple):
    """One item of a kernel: ``dst = src``, or ``dst = dst ⊕ src``."""

    kind: Literal["copy", "reduce"]
    dst: Place
    src: Place


_SEND, _RECV, _COPY, _REDUCE = 1, 2, 3, 4
"""Kinds of rows, as schedules/rounds.hpp has them; 0 begins a group."""
_Row = Sequence[int]


class RankRounds:
    """One rank's part: what it does first, and then in each round.

    Args:
        rank: whose part.
        spaces: the rank's spaces.
        all_rounds: those of all ranks, in the engine's form.
    """

    def __init__(
        self, rank: int, spaces: tuple[Space, ...], all_rounds: _native.AllRounds
    ) -> None:
        self.rank = rank
        self.spaces = spaces
        self.all_rounds = all_rounds
        self.num_rounds = all_rounds.num_rounds(rank)
        """Rounds of a fragment, equal on all ranks."""
        self.num_slots = all_rounds.num_slots(rank)
        """Slots of a fragment."""

    @cached_property
    def _rows(self) -> list[_Row]:
        found: list[_Row] = self.all_rounds.rows(self.rank).tolist()
        return found

    @cached_property
    def sends(self) -> tuple[tuple[Message, ...], ...]:
        """Messages that the rank sends, by round."""
        return self._messages(_SEND)

    @cached_property
    def recvs(self) -> tuple[tuple[Message, ...], ...]:
        """Messages that it receives, by round."""
        return self._messages(_RECV)

    @cached_property
    def work(self) -> tuple[tuple[Work, ...], ...]:
        """Work before the first round, and behind each."""
        found: list[list[Work]] = [[] for _ in range(self.num_rounds + 1)]
        for row in self._rows:
            if row[0] in (_COPY, _REDUCE):
                found[row[1] + 1].append(_work(row))
        return tuple(map(tuple, found))

    def _messages(self, kind: int) -> tuple[tuple[Message, ...], ...]:
        found: list[list[Message]] = [[] for _ in range(self.num_rounds)]
        for row in self._rows:
            if row[0] == kind:
                found[row[1]].append(_message(row))
        return tuple(map(tuple, found))


def _place(slot: int, space: int, lo: int, hi: int) -> Place:
    where = Slice(space, lo, hi)
    return where if slot < 0 else Slot(slot, where)


def _message(row: _Row) -> Message:
    return Message(row[2], row[3], _place(*row[4:8]))


def _work(row: _Row) -> Work:
    kind: Literal["copy", "reduce"] = "copy" if row[0] == _COPY else "reduce"
    return Work(kind, _place(*row[4:8]), _place(*row[8:12]))


@dataclass(frozen=True)
class Group:
    """Messages that move at the same time; each with its fragment."""

    round: int
    """Number of the round, counted over all fragments. Groups of all ranks with the
    same number and ``part`` are one round."""
    part: int
    """Number of the part, if the round was too large for one group."""
    sends: tuple[tuple[int, Message], ...]
    recvs: tuple[tuple[int, Message], ...]


Step = Group | tuple[int, Work]
"""One item of a stream: a group of messages, or a fragment's work."""


def lower_to_rounds(schedule: Schedule) -> list[RankRounds]:
    """Return the rounds of all ranks, or raise ScheduleError where there are none."""
    lowered = [
        lower(schedule, rank, lambda peer: False) for rank in range(schedule.size)
    ]
    multiple = schedule.length_unit
    try:
        rounds = lowered_programs(lowered, multiple).rounds()
    except _native.ScheduleFaultError as fault:
        raise ScheduleError(_said(fault)) from None
    return [RankRounds(one.rank, one.spaces, rounds) for one in lowered]


def _said(fault: _native.ScheduleFaultError) -> str:
    """Return why there are no rounds, in words."""
    kind, numbers, _ = fault.args
    if kind == "no rounds":
        rank, index = numbers
        return (
            f"no rounds: rank {rank} waits for ever in instruction {index}, for a "
            f"message that nobody sends or for one that waits for it"
        )
    if kind == "sends and works":
        rank, index = numbers
        return (
            f"rank {rank} instruction {index} sends and does other work, too: rounds "
            f"need instructions that only send"
        )
    rank, k, peer = numbers
    if kind == "no length":
        return (
            f"rank {rank} takes message {k} from rank {peer} and keeps nothing of it: "
            f"its length is not known; let the step that receives it keep its blocks"
        )
    return (
        f"rank {rank} sends message {k} to rank {peer}, which does not receive it; "
        f"every send needs one receive"
    )


def sequence(
    own: RankRounds,
    size: int,
    *,
    fragments: int = 1,
    lag: int = 1,
    shape: GroupShape | None = None,
) -> list[Step]:
    """Return a rank's program, in order: groups, and fragments' work.

    Fragment f is the whole program on a part of every block, ``f * lag`` rounds later:
    while one rank passes a fragment on, it receives the next one.

    Args:
        own: the rank's rounds.
        size: the number of ranks.
        fragments: how many.
        lag: rounds from one fragment to the next; equal on all ranks, as all are.
        shape: how large groups may be; larger ones are cut, at both ends alike.
    """
    shape = shape or GroupShape.of(size)
    rows = sequence_rows(own, size, fragments=fragments, lag=lag, shape=shape)
    return _steps_of(rows)


def sequence_rows(
    own: RankRounds, size: int, *, fragments: int, lag: int, shape: GroupShape
) -> Rows:
    """Return a rank's program as ``sequence`` does, row by row."""
    return own.all_rounds.sequence(
        own.rank,
        size=size,
        fragments=fragments,
        lag=lag,
        distances=shape.distances,
        messages=shape.messages,
    )


def _steps_of(rows: Rows) -> list[Step]:
    """Return a program's steps from its rows."""
    steps: list[Step] = []
    left = iter(rows.tolist())
    for row in left:
        if row[0] in (_COPY, _REDUCE):
            steps.append((row[1], _work(row)))
            continue
        messages = [next(left) for _ in range(row[3])]
        sends, recvs = (
            tuple((each[1], _message(each)) for each in messages if each[0] == kind)
            for kind in (_SEND, _RECV)
        )
        steps.append(Group(row[1], row[2], sends, recvs))
    return steps


def rows_of(steps: Sequence[Step]) -> Rows:
    """Return the rows of a program's steps."""
    none = (-1, -1, 0, 0)
    rows: list[tuple[int, ...]] = []
    for step in steps:
        if not isinstance(step, Group):
            fragment, work = step
            kind = _COPY if work.kind == "copy" else _REDUCE
            places = _numbers(work.dst) + _numbers(work.src)
            rows.append((kind, fragment, -1, 0, *places))
            continue
        count = len(step.sends) + len(step.recvs)
        rows.append((0, step.round, step.part, count, *none, *none))
        for kind, ends in ((_SEND, step.sends), (_RECV, step.recvs)):
            for fragment, (peer, k, place) in ends:
                rows.append((kind, fragment, peer, k, *_numbers(place), *none))
    return np.array(rows, np.int32).reshape(-1, 12)


def _numbers(place: Place) -> tuple[int, int, int, int]:
    if isinstance(place, Slot):
        return place.number, *place.like
    return -1, *place
