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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from commrt.errors import ScheduleError
from commrt.nccl.config import GroupShape
from commrt.schedule.dependencies import locations
from commrt.schedule.ir import Schedule, Slice, Space
from commrt.schedule.lower import LOCAL, Entry, Lowered, lower

__all__ = [
    "Group",
    "Message",
    "Place",
    "RankRounds",
    "Slot",
    "Step",
    "Work",
    "lower_to_rounds",
    "sequence",
]


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


@dataclass
class _Round:
    sends: list[Message] = field(default_factory=list)
    recvs: list[Message] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)


@dataclass(frozen=True)
class RankRounds:
    """One rank's part: what it does first, and then in each round."""

    rank: int
    spaces: tuple[Space, ...]
    sends: tuple[tuple[Message, ...], ...]
    """Messages that the rank sends, by round."""
    recvs: tuple[tuple[Message, ...], ...]
    work: tuple[tuple[Work, ...], ...]
    """Work before the first round, and behind each."""

    @property
    def num_rounds(self) -> int:
        """Rounds of a fragment, equal on all ranks."""
        return len(self.sends)


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
    when = _Timing(lowered)
    count = 1 + max((number for own in when.done for number in own), default=-1)
    return [
        _rounds_of(one, count, when.done[one.rank], when.messages) for one in lowered
    ]


MessageId = tuple[int, int, int]
"""sender, receiver, k."""
_BEFORE = -1
"""The round of what waits for no message."""


class _Timing:
    """Rounds in which each instruction of each rank is done."""

    def __init__(self, lowered: Sequence[Lowered]) -> None:
        self.lowered = lowered
        self.messages: dict[MessageId, int] = {}
        self.done = [[_BEFORE] * len(one) for one in lowered]
        self._inputs = [[one.inputs_of(i) for i in range(len(one))] for one in lowered]
        self._deps = [[one.deps_of(i) for i in range(len(one))] for one in lowered]
        self._sent = [
            [_sent_by(one, i) for i in range(len(one))] for one in self.lowered
        ]
        self._run()

    def _run(self) -> None:
        missing = [[0] * len(one) for one in self.lowered]
        followers: dict[tuple[int, int], list[tuple[int, int]]] = {}
        receivers: dict[MessageId, tuple[int, int]] = {}
        ready: list[tuple[int, int]] = []
        for rank, one in enumerate(self.lowered):
            for index in range(len(one)):
                needed = self._deps[rank][index]
                for other in needed:
                    followers.setdefault((rank, other), []).append((rank, index))
                taken = _taken_by(rank, self._inputs[rank][index])
                for message in taken:
                    receivers[message] = rank, index
                missing[rank][index] = len(needed) + len(taken)
                if not missing[rank][index]:
                    ready.append((rank, index))
        num_done = 0
        while ready:
            rank, index = ready.pop()
            num_done += 1
            self._settle(rank, index)
            after = followers.get((rank, index), [])
            sent = self._sent[rank][index]
            if sent is not None:
                if sent not in receivers:
                    raise ScheduleError(
                        f"rank {rank} sends message {sent[2]} to rank {sent[1]}, which "
                        f"does not receive it; every send needs one receive"
                    )
                after = [*after, receivers[sent]]
            for follower in after:
                missing[follower[0]][follower[1]] -= 1
                if not missing[follower[0]][follower[1]]:
                    ready.append(follower)
        for rank, one in enumerate(self.lowered):
            stuck = [i for i in range(len(one)) if missing[rank][i]]
            if stuck:
                raise ScheduleError(
                    f"no rounds: rank {rank} waits for ever in instruction {stuck[0]}, "
                    f"for a message that nobody sends or for one that waits for it"
                )

    def _settle(self, rank: int, index: int) -> None:
        done = self.done[rank]
        before = [done[other] for other in self._deps[rank][index]]
        sent = self._sent[rank][index]
        if sent is not None:
            # The value that it sends was made in an earlier round, at the latest.
            done[index] = self.messages[sent] = 1 + max(before, default=_BEFORE)
            return
        taken = _taken_by(rank, self._inputs[rank][index])
        before += [self.messages[message] for message in taken]
        done[index] = max(before, default=_BEFORE)


def _sent_by(one: Lowered, index: int) -> MessageId | None:
    outputs = [entry for entry in one.outputs_of(index) if entry[0] != LOCAL]
    if not outputs:
        return None
    inputs = one.inputs_of(index)
    if len(one.outputs_of(index)) != 1 or len(inputs) != 1 or inputs[0][0] != LOCAL:
        raise ScheduleError(
            f"rank {one.rank} instruction {index} sends and does other work, too: "
            f"rounds need instructions that only send"
        )
    return one.rank, outputs[0][1], outputs[0][2]


def _taken_by(rank: int, inputs: Iterable[Entry]) -> list[MessageId]:
    return [(peer, rank, k) for kind, peer, k, _ in inputs if kind != LOCAL]


def _rounds_of(
    one: Lowered, count: int, done: Sequence[int], messages: dict[MessageId, int]
) -> RankRounds:
    return _RankLowering(one, count, done, messages).result()


class _RankLowering:
    """The rounds of one rank, filled instruction by instruction."""

    def __init__(
        self,
        one: Lowered,
        count: int,
        done: Sequence[int],
        messages: dict[MessageId, int],
    ) -> None:
        self.one = one
        self.done = done
        self.messages = messages
        self.rounds = [_Round() for _ in range(count + 1)]  # [-1]: before the first
        self._first = locations(one.spaces)
        self._num_slots = 0
        # Memory that a round's groups read and write; straight receives must keep off
        # it.
        self._touched: dict[int, list[range]] = {}

    def result(self) -> RankRounds:
        one = self.one
        for index in range(len(one)):
            if _sent_by(one, index) is not None:
                self._send(index)
        for index in range(len(one)):
            if _sent_by(one, index) is None:
                self._compute(index)
        for each in self.rounds:
            for ends in (each.sends, each.recvs):
                ends.sort(key=lambda message: (message.peer, message.k))
        before = self.rounds[_BEFORE]
        rounds = self.rounds[:-1]
        return RankRounds(
            one.rank,
            one.spaces,
            tuple(tuple(each.sends) for each in rounds),
            tuple(tuple(each.recvs) for each in rounds),
            (tuple(before.work), *(tuple(each.work) for each in rounds)),
        )

    def _send(self, index: int) -> None:
        (_, space, lo, hi), *_ = self.one.inputs_of(index)
        (_, peer, k, _), *_ = self.one.outputs_of(index)
        number = self.done[index]
        source = Slice(space, lo, hi)
        self.rounds[number].sends.append(Message(peer, k, source))
        self._touched.setdefault(number, []).append(self._blocks(source))

    def _compute(self, index: int) -> None:
        inputs, number = self.one.inputs_of(index), self.done[index]
        outputs = [Slice(*entry[1:]) for entry in self.one.outputs_of(index)]
        straight = self._may_come_straight(index, outputs)
        if straight and not self._arrives(inputs[0], number) and len(inputs) > 1:
            # The first two operands may stand in either order.
            inputs[:2] = inputs[1::-1]
        straight = straight and self._arrives(inputs[0], number)
        places: list[Place] = []
        for position, entry in enumerate(inputs):
            if entry[0] == LOCAL:
                places.append(Slice(*entry[1:]))
            else:
                first = straight and position == 0
                places.append(self._receive(entry, outputs, inputs, straight=first))
        if not outputs:
            return
        work = self.rounds[number].work
        where = self._combine(places, outputs[0], work)
        for output in outputs:
            if output != where:
                work.append(Work("copy", output, where))

    def _arrives(self, entry: Entry, number: int) -> bool:
        """Return whether a message comes in the round in which it is used."""
        if entry[0] == LOCAL:
            return False
        return self.messages[entry[1], self.one.rank, entry[2]] == number

    def _may_come_straight(self, index: int, outputs: Sequence[Slice]) -> bool:
        """Return whether a message may be received where the first output is."""
        number = self.done[index]
        if not outputs or number == _BEFORE:
            return False
        if any(self.done[other] >= number for other in self.one.deps_of(index)):
            return False
        target = self._blocks(outputs[0])
        own = [e for e in self.one.inputs_of(index) if e[0] == LOCAL]
        reads = [self._blocks(Slice(*entry[1:])) for entry in own]
        return not any(
            _meet(target, other) for other in (*reads, *self._touched.get(number, ()))
        )

    def _receive(
        self,
        entry: Entry,
        outputs: Sequence[Slice],
        inputs: Sequence[Entry],
        *,
        straight: bool,
    ) -> Place:
        _, peer, k, _ = entry
        number = self.messages[peer, self.one.rank, k]
        place: Place
        if straight:
            place = outputs[0]
            self._touched.setdefault(number, []).append(self._blocks(place))
        else:
            own = [Slice(*e[1:]) for e in inputs if e[0] == LOCAL]
            place = self._slot((*outputs, *own)[0])
        self.rounds[number].recvs.append(Message(peer, k, place))
        return place

    def _slot(self, like: Slice) -> Slot:
        self._num_slots += 1
        return Slot(self._num_slots - 1, like)

    def _combine(self, places: list[Place], output: Slice, work: list[Work]) -> Place:
        """Reduce ``places`` from the left; return where the value is then."""
        if len(places) == 1:
            return places[0]
        target = self._blocks(output)
        shared = self._lying_in(places, target)
        if shared == [1] and self._blocks_of(places[1]) == target:
            places = [places[1], places[0], *places[2:]]
            shared = [0]
        where: Place
        if not shared or (shared == [0] and self._blocks_of(places[0]) == target):
            # If in[i] and out[i] are the same, in place, this copies a block to itself.
            where = output
        elif isinstance(places[0], Slot):
            where = places[0]
        else:
            where = self._slot(output)
        if where != places[0]:
            work.append(Work("copy", where, places[0]))
        work.extend(Work("reduce", where, place) for place in places[1:])
        return where

    def _lying_in(self, places: Sequence[Place], target: range) -> list[int]:
        """Return the operands that lie at the place of the result."""
        return [
            i
            for i, place in enumerate(places)
            if isinstance(place, Slice) and _meet(target, self._blocks(place))
        ]

    def _blocks_of(self, place: Place) -> range | None:
        return self._blocks(place) if isinstance(place, Slice) else None

    def _blocks(self, where: Slice) -> range:
        """Return the numbers of its blocks, those of ``in`` as those of ``out``."""
        first = self._first[where.space]
        return range(first + where.lo, first + where.hi)


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
    steps: list[Step] = []
    for number in range(own.num_rounds + (fragments - 1) * lag + 1):
        running = [
            (f, number - f * lag)
            for f in range(fragments)
            if 0 <= number - f * lag <= own.num_rounds
        ]
        for f, at in running:
            if at == 0:
                steps.extend((f, work) for work in own.work[0])
        moving = [(f, at) for f, at in running if at < own.num_rounds]
        steps.extend(_groups(own, size, number, moving, shape))
        for f, at in moving:
            steps.extend((f, work) for work in own.work[at + 1])
    return steps


def _groups(
    own: RankRounds,
    size: int,
    number: int,
    moving: Sequence[tuple[int, int]],
    shape: GroupShape,
) -> Iterator[Group]:
    """Cut a round by what both ends of a message know: its place among the pair's
    messages, and the distance from sender to receiver."""
    parts: dict[int, tuple[list[tuple[int, Message]], list[tuple[int, Message]]]] = {}
    spans = -(-size // shape.distances)
    for is_recv in (False, True):
        seen: dict[int, int] = {}
        for fragment, at in moving:
            for message in (own.recvs if is_recv else own.sends)[at]:
                k = seen.get(message.peer, 0)
                seen[message.peer] = k + 1
                ahead = message.peer - own.rank
                ahead = (-ahead if is_recv else ahead) % size
                part = k // shape.messages * spans + ahead // shape.distances
                ends = parts.setdefault(part, ([], []))
                ends[is_recv].append((fragment, message))
    for part in sorted(parts):
        sends, recvs = parts[part]
        yield Group(number, part, tuple(sends), tuple(recvs))


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
