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

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from commrt.errors import ScheduleError
from commrt.nccl.config import GroupShape
from commrt.schedule.dependencies import locations
from commrt.schedule.goals import Content, Goal
from commrt.schedule.ir import Schedule, Slice
from commrt.schedule.rounds import (
    Group,
    Message,
    Place,
    RankRounds,
    Slot,
    Step,
    Work,
    lower_to_rounds,
    sequence,
)
from commrt.schedule.verify import BlockLengths, SymbolicMemory, combine
from commrt.vocabulary.operations import operation

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
        report = check_rounds(schedule, rounds, _sequences(rounds, 1, 1, shape), shape)
        if fragments > 1:
            several = _sequences(rounds, fragments, lag, shape)
            check_rounds(schedule, rounds, several, shape)
    except ScheduleError as exc:
        raise ScheduleError(
            f"{schedule.coll} {schedule.algorithm} on {schedule.size} ranks, in "
            f"rounds: {exc}"
        ) from exc
    return report


def _sequences(
    rounds: Sequence[RankRounds], fragments: int, lag: int, shape: GroupShape
) -> list[list[Step]]:
    return [
        sequence(own, len(rounds), fragments=fragments, lag=lag, shape=shape)
        for own in rounds
    ]


def check_rounds(
    schedule: Schedule,
    rounds: Sequence[RankRounds],
    steps: Sequence[Sequence[Step]],
    shape: GroupShape,
) -> RoundsReport:
    """Check what all ranks run, in their order, or raise ScheduleError."""
    groups = [[step for step in own if isinstance(step, Group)] for own in steps]
    _check_closed(schedule, rounds, groups)
    most_calls = _check_sizes(groups, shape)
    for own, mine in zip(rounds, groups, strict=True):
        _check_undisturbed(own, mine)
    _check_meaning(schedule, rounds, steps)
    return RoundsReport(
        num_rounds=max((own.num_rounds for own in rounds), default=0),
        most_calls=most_calls,
        slots=max((len(_slots(own)) for own in rounds), default=0),
    )


Key = tuple[int, int]
"""Round and part."""


def _check_closed(
    schedule: Schedule, rounds: Sequence[RankRounds], groups: Sequence[Sequence[Group]]
) -> None:
    lengths = BlockLengths(schedule, [own.spaces for own in rounds])
    sent: dict[tuple[Key, int, int], list[tuple[int, Message]]] = {}
    received: dict[tuple[Key, int, int], list[tuple[int, Message]]] = {}
    for rank, own in enumerate(groups):
        keys = [(group.round, group.part) for group in own]
        if any(a >= b for a, b in pairwise(keys)):
            raise ScheduleError(
                f"rank {rank} runs its groups in the order {keys}; expected (round, "
                f"part) to rise"
            )
        for key, group in zip(keys, own, strict=True):
            for fragment, message in group.sends:
                pair = key, rank, message.peer
                sent.setdefault(pair, []).append((fragment, message))
            for fragment, message in group.recvs:
                pair = key, message.peer, rank
                received.setdefault(pair, []).append((fragment, message))
    for pair in sorted({*sent, *received}):
        key, source, target = pair
        ends = sent.get(pair, []), received.get(pair, [])
        numbers = [[(f, message.k) for f, message in end] for end in ends]
        if numbers[0] != numbers[1]:
            raise ScheduleError(
                f"round {key[0]} part {key[1]} is not closed: rank {source} sends "
                f"messages {numbers[0]} (fragment, number) to rank {target}, which "
                f"receives {numbers[1]} in it"
            )
        for (_, send), (_, recv) in zip(*ends, strict=True):
            if not lengths.agree(source, _like(send.place), target, _like(recv.place)):
                raise ScheduleError(
                    f"round {key[0]}: message {send.k} from rank {source} to rank "
                    f"{target} has another length there, for some vectors; both ends "
                    f"need the same"
                )


def _like(place: Place) -> Slice:
    return place.like if isinstance(place, Slot) else place


def _check_sizes(groups: Sequence[Sequence[Group]], shape: GroupShape) -> int:
    most = 0
    for rank, own in enumerate(groups):
        for group in own:
            most = max(most, len(group.sends) + len(group.recvs))
            for what, ends in (("sends", group.sends), ("receives", group.recvs)):
                peers = Counter(message.peer for _, message in ends)
                many = max(peers.values(), default=0)
                if len(peers) > shape.distances or many > shape.messages:
                    raise ScheduleError(
                        f"round {group.round} part {group.part} of rank {rank} has "
                        f"{what} for {len(peers)} ranks, up to {many} for one; a "
                        f"group takes {shape.distances} and {shape.messages}"
                    )
    return most


def _check_undisturbed(own: RankRounds, groups: Sequence[Group]) -> None:
    first = locations(own.spaces)

    def blocks(fragment: int, place: Place) -> set[tuple[int, int | Slot]]:
        if isinstance(place, Slot):
            return {(fragment, place)}
        start = first[place.space]
        return {(fragment, start + block) for block in range(place.lo, place.hi)}

    for group in groups:
        taken: set[tuple[int, int | Slot]] = set()
        for fragment, message in group.sends:
            taken |= blocks(fragment, message.place)
        for fragment, message in group.recvs:
            mine = blocks(fragment, message.place)
            if taken & mine:
                raise ScheduleError(
                    f"round {group.round} of rank {own.rank}: message {message.k} from "
                    f"rank {message.peer} comes where the same group sends from or "
                    f"receives"
                )
            taken |= mine


def _slots(own: RankRounds) -> set[int]:
    messages = [m for ends in (*own.sends, *own.recvs) for m in ends]
    work = [w for each in own.work for w in each]
    places: Iterable[Place] = [
        *(message.place for message in messages),
        *(place for one in work for place in (one.dst, one.src)),
    ]
    return {place.number for place in places if isinstance(place, Slot)}


class _Symbolic:
    """The contents of all ranks' memory, for one fragment each."""

    def __init__(
        self, schedule: Schedule, rounds: Sequence[RankRounds], in_place: bool
    ) -> None:
        self.goal = Goal(schedule.coll, schedule.size, schedule.root)
        self.redop_class = schedule.redop_class
        self._spaces = [own.spaces for own in rounds]
        self._in_place = in_place
        self.memories: dict[int, SymbolicMemory] = {}
        self._slots: dict[tuple[int, int, int], list[Content]] = {}

    def memory(self, fragment: int) -> SymbolicMemory:
        if fragment not in self.memories:
            self.memories[fragment] = SymbolicMemory(
                self.goal, self._spaces, in_place=self._in_place
            )
        return self.memories[fragment]

    def read(self, rank: int, fragment: int, place: Place) -> list[Content]:
        if not isinstance(place, Slot):
            return self.memory(fragment).read(rank, place)
        if (rank, fragment, place.number) not in self._slots:
            raise ScheduleError(
                f"it reads slot {place.number}, which holds nothing yet; write it first"
            )
        return self._slots[rank, fragment, place.number]

    def write(
        self, rank: int, fragment: int, place: Place, value: list[Content]
    ) -> None:
        if isinstance(place, Slot):
            self._slots[rank, fragment, place.number] = value
        else:
            self.memory(fragment).write(rank, place, value)

    def work(self, rank: int, fragment: int, work: Work) -> None:
        """Carry out a copy or a reduction."""
        value = self.read(rank, fragment, work.src)
        if work.kind == "reduce":
            value = combine(
                self.read(rank, fragment, work.dst),
                value,
                # Kernels take their operands in any order.
                "none" if self.redop_class == "none" else "commutative",
                idempotent=self.goal.idempotent,
            )
        self.write(rank, fragment, work.dst, value)


def _check_meaning(
    schedule: Schedule, rounds: Sequence[RankRounds], steps: Sequence[Sequence[Step]]
) -> None:
    modes = (False, True) if operation(schedule.coll).in_place else (False,)
    for in_place in modes:
        symbolic = _Symbolic(schedule, rounds, in_place)
        _run(symbolic, steps)
        for fragment in symbolic.memories or [0]:
            for rank in range(schedule.size):
                symbolic.memory(fragment).check(symbolic.goal, rank)


def _run(symbolic: _Symbolic, steps: Sequence[Sequence[Step]]) -> None:
    """Run all ranks, round by round: closed rounds let them."""
    position = [0] * len(steps)
    keys = sorted(
        {(g.round, g.part) for own in steps for g in own if isinstance(g, Group)}
    )
    for key in [*keys, None]:
        moving: list[tuple[int, Group]] = []
        for rank, own in enumerate(steps):
            while position[rank] < len(own):
                step = own[position[rank]]
                if isinstance(step, Group):
                    if (step.round, step.part) == key:
                        moving.append((rank, step))
                        position[rank] += 1
                    break
                fragment, work = step
                try:
                    symbolic.work(rank, fragment, work)
                except ScheduleError as exc:
                    raise ScheduleError(
                        f"rank {rank} fragment {fragment}, {work.kind} after round "
                        f"{key}: {exc}"
                    ) from exc
                position[rank] += 1
        _move(symbolic, moving)
    # Steps that remain behind the last groups.
    for rank, own in enumerate(steps):
        for step in own[position[rank] :]:
            if isinstance(step, Group):
                raise ScheduleError(f"rank {rank} never comes to round {step.round}")
            symbolic.work(rank, *step)


def _move(symbolic: _Symbolic, moving: Sequence[tuple[int, Group]]) -> None:
    """Move the messages of one group: all are read before any is written."""
    values: dict[tuple[int, int, int, int], list[Content]] = {}
    for rank, group in moving:
        for fragment, message in group.sends:
            values[fragment, rank, message.peer, message.k] = symbolic.read(
                rank, fragment, message.place
            )
    for rank, group in moving:
        for fragment, message in group.recvs:
            value = values[fragment, message.peer, rank, message.k]
            symbolic.write(rank, fragment, message.place, value)
