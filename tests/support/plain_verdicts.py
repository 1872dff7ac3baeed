# SPDX-License-Identifier: Apache-2.0
"""Verdicts on schedules in plain Python, for comparison with the native checks.

Nothing is left out to save time: every block, every fragment, in place and out of
place, every pair of steps that touch a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from commrt.errors import ScheduleError
from commrt.schedule.dependencies import locations
from commrt.schedule.engine_model import EngineModel
from commrt.schedule.goals import Content, Goal
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice, Space, Step
from commrt.schedule.lower import LOCAL, Lowered
from commrt.schedule.rounds import Group, Place, Slot
from commrt.schedule.rounds import Step as StreamStep

Held = list[Content]
Touches = tuple[set[int], set[int]]
"""Locations that are read, and written."""
LENGTHS = range(25)


class WrongError(Exception):
    """The faults that the plain checks found."""


def needs(condition: bool, said: str) -> None:
    if not condition:
        raise WrongError(said)


def verdict(check: Callable[[], object]) -> bool:
    """Return whether a check passes."""
    try:
        check()
    except (WrongError, ScheduleError):
        return False
    return True


class Memory:
    """The contents of all blocks of all ranks, for one way in which buffers may lie."""

    def __init__(
        self, schedule: Schedule, spaces: Sequence[Sequence[Space]], *, in_place: bool
    ) -> None:
        self.goal = Goal(schedule.coll, schedule.size, schedule.root)
        self.rule = schedule.redop_class
        self.held: list[list[list[Content | None]]] = []
        self.slots: dict[tuple[int, int], Held] = {}
        for rank, own in enumerate(spaces):
            held: list[list[Content | None]] = []
            for number, space in enumerate(own):
                shared = in_place and space.alias and space.nblk == own[0].nblk
                if number == 0:
                    held.append([*self.goal.initial(rank, space.nblk)])
                else:
                    held.append(held[0] if shared else [None] * space.nblk)
            self.held.append(held)

    def read(self, rank: int, where: Place) -> Held:
        if isinstance(where, Slot):
            needs((rank, where.number) in self.slots, "an empty slot")
            return self.slots[rank, where.number]
        found = self.held[rank][where.space][where.lo : where.hi]
        known = [each for each in found if each is not None]
        needs(len(known) == len(found), "nothing there")
        return known

    def write(self, rank: int, where: Place, value: Held) -> None:
        if isinstance(where, Slot):
            self.slots[rank, where.number] = value
        else:
            self.held[rank][where.space][where.lo : where.hi] = value

    def combined(self, first: Held, second: Held) -> Held:
        needs(len(first) == len(second), "lengths")
        return [self._one(*pair) for pair in zip(first, second, strict=True)]

    def _one(self, first: Content, second: Content) -> Content:
        (part, ranks), (other, others) = first, second
        needs(part == other, "two parts")
        if not self.goal.idempotent:
            needs(self.rule != "none", "no reduction")
            needs(not ranks & others, "twice")
        if self.rule == "ordered":
            lowest = (others & -others).bit_length() - 1
            needs(ranks.bit_length() == lowest, "out of order")
        return part, ranks | others

    def check(self) -> None:
        for rank, own in enumerate(self.held):
            needs(own[1] == self.goal.final(rank, len(own[1])), "another end")


def check_ordered(deps: Sequence[Iterable[int]], touched: Sequence[Touches]) -> None:
    """Raise unless all pairs that touch a location, one writing, are ordered."""
    before: list[set[int]] = []
    for index, direct in enumerate(deps):
        before.append(set(direct).union(*(before[one] for one in direct)))
        reads, writes = touched[index]
        for other in range(index):
            others_reads, others_writes = touched[other]
            met = writes & (others_reads | others_writes) or reads & others_writes
            needs(not met or other in before[index], "race")


# The author's steps


def check_steps(schedule: Schedule) -> None:
    """Raise WrongError unless the steps of all ranks are right."""
    programs = schedule.programs()
    for program in programs:
        for index, step in enumerate(program.steps):
            _check_step(program, index, step, schedule.size)
    partners = _partners(programs)
    _check_lengths(programs, partners)
    order = _rendezvous(programs, partners)
    for program in programs:
        touched = [_touched(program, step) for step in program.steps]
        check_ordered([step.deps for step in program.steps], touched)
    runs = [
        _messages(schedule, programs, order, in_place=in_place)
        for in_place in (False, True)
    ]
    needs(runs[0] == runs[1], "another thing in place")


End = tuple[int, int]


def _check_step(program: RankProgram, index: int, step: Step, size: int) -> None:
    moves = step.op in (Op.SEND, Op.RECV, Op.RRED)
    needs((step.src is not None) == (step.op is not Op.RECV), "src")
    needs((step.dst is not None) == (step.op is not Op.SEND), "dst")
    needs((step.peer >= 0) == moves, "peer")
    needs(step.peer != program.rank and step.peer < size, "peer")
    needs(all(0 <= dep < index for dep in step.deps), "deps")
    for end in (step.src, step.dst):
        if end is not None:
            needs(0 <= end.space < len(program.spaces), "space")
            needs(0 <= end.lo < end.hi <= program.spaces[end.space].nblk, "blocks")
    if step.dst is not None:
        needs(program.spaces[step.dst.space].kind != "in", "input written")
    if step.src is not None and step.dst is not None:
        src, dst = (_blocks(program.spaces, end) for end in (step.src, step.dst))
        needs(len(src) == len(dst), "counts")
        needs(src == dst or not {*src} & {*dst}, "overlap")


def _blocks(spaces: Sequence[Space], where: Slice) -> range:
    first = locations(spaces)[where.space]
    return range(first + where.lo, first + where.hi)


def _touched(program: RankProgram, step: Step) -> Touches:
    reads, writes = set[int](), set[int]()
    if step.src is not None:
        reads |= {*_blocks(program.spaces, step.src)}
    if step.dst is not None:
        writes |= {*_blocks(program.spaces, step.dst)}
        if step.op is Op.RED:
            reads |= writes
    return reads, writes


def _partners(programs: Sequence[RankProgram]) -> dict[End, End]:
    ends: dict[tuple[int, int], tuple[list[End], list[End]]] = defaultdict(
        lambda: ([], [])
    )
    for program in programs:
        for index, step in enumerate(program.steps):
            if step.op is Op.SEND:
                ends[program.rank, step.peer][0].append((program.rank, index))
            elif step.peer >= 0:
                ends[step.peer, program.rank][1].append((program.rank, index))
    found: dict[End, End] = {}
    for sends, recvs in ends.values():
        needs(len(sends) == len(recvs), "unmatched")
        found.update(zip(sends, recvs, strict=True))
        found.update(zip(recvs, sends, strict=True))
    return found


def _check_lengths(programs: Sequence[RankProgram], partners: dict[End, End]) -> None:
    multiple = len(programs)

    def lengths(rank: int, where: Slice) -> list[list[int]]:
        found = []
        for number in LENGTHS:
            edges = programs[rank].spaces[where.space].bounds(number * multiple)
            run = edges[where.lo : where.hi + 1]
            found.append([b - a for a, b in pairwise(run)])
        return found

    for (rank, index), (other, at) in partners.items():
        src, dst = programs[rank].steps[index].src, programs[other].steps[at].dst
        if programs[rank].steps[index].op is Op.SEND:
            needs(lengths(rank, src) == lengths(other, dst), "lengths")


def _rendezvous(
    programs: Sequence[RankProgram], partners: dict[End, End]
) -> list[tuple[End, End | None]]:
    """Return what is done: a local step, or a receive and its send."""
    done: set[End] = set()
    order: list[tuple[End, End | None]] = []

    def posted(end: End) -> bool:
        rank, index = end
        deps = programs[rank].steps[index].deps
        return all((rank, dep) in done for dep in deps)

    everything = [
        (program.rank, index)
        for program in programs
        for index in range(len(program.steps))
    ]
    moved = True
    while moved:
        moved = False
        for end in everything:
            other = partners.get(end)
            if end in done or not posted(end) or (other and not posted(other)):
                continue
            sends = programs[end[0]].steps[end[1]].op is Op.SEND
            order.append((other, end) if sends and other else (end, other))
            done |= {end, other} if other else {end}
            moved = True
    needs(len(done) == len(everything), "deadlock")
    return order


def _messages(
    schedule: Schedule,
    programs: Sequence[RankProgram],
    order: Sequence[tuple[End, End | None]],
    *,
    in_place: bool,
) -> list[Held]:
    """Run all steps; return what moved."""
    memory = Memory(schedule, [one.spaces for one in programs], in_place=in_place)
    found = []
    for (rank, index), sender in order:
        step = programs[rank].steps[index]
        at, sent = (
            (rank, step)
            if sender is None
            else (
                sender[0],
                programs[sender[0]].steps[sender[1]],
            )
        )
        value = memory.read(at, sent.src)
        found.append(value)
        if step.op in (Op.RRED, Op.RED):
            own = memory.read(rank, step.src if step.op is Op.RRED else step.dst)
            first = step.op is Op.RRED and step.peer < rank
            value = memory.combined(*((value, own) if first else (own, value)))
        memory.write(rank, step.dst, value)
    memory.check()
    return found


# Lowered programs


def check_lowered(
    schedule: Schedule, lowered: Sequence[Lowered], fragments: int = 3
) -> None:
    """Raise WrongError or ScheduleError unless lowered programs are right."""
    sent, taken = ([*_messages_of(lowered, inputs=each)] for each in (False, True))
    needs(sorted(sent) == sorted(taken) == sorted({*sent}), "messages")
    for one in lowered:
        deps = [one.deps_of(index) for index in range(len(one))]
        check_ordered(deps, [_touched_by(one, index) for index in range(len(one))])
    order = [*EngineModel(lowered, fragments)]
    for in_place in (False, True):
        spaces = [one.spaces for one in lowered]
        memories = [
            Memory(schedule, spaces, in_place=in_place) for _ in range(fragments)
        ]
        messages: dict[tuple[int, ...], Held] = {}
        for rank, fragment, index in order:
            memory, value = memories[fragment], None
            for kind, a, b, c in lowered[rank].inputs_of(index):
                if kind == LOCAL:
                    operand = memory.read(rank, Slice(a, b, c))
                else:
                    operand = messages.pop((fragment, a, rank, b))
                value = operand if value is None else memory.combined(value, operand)
            assert value is not None
            for kind, a, b, c in lowered[rank].outputs_of(index):
                if kind == LOCAL:
                    memory.write(rank, Slice(a, b, c), value)
                else:
                    messages[fragment, rank, a, b] = value
        for memory in memories:
            memory.check()


def _messages_of(
    lowered: Sequence[Lowered], *, inputs: bool
) -> Iterable[tuple[int, int, int]]:
    for one in lowered:
        for index in range(len(one)):
            rows = one.inputs_of(index) if inputs else one.outputs_of(index)
            for kind, peer, k, _ in rows:
                if kind != LOCAL:
                    ends = (peer, one.rank) if inputs else (one.rank, peer)
                    yield (*ends, k)


def _touched_by(one: Lowered, index: int) -> Touches:
    reads, writes = (
        {
            block
            for kind, *where in rows
            if kind == LOCAL
            for block in _blocks(one.spaces, Slice(*where))
        }
        for rows in (one.inputs_of(index), one.outputs_of(index))
    )
    return reads, writes


# What streams run


def check_streams(
    schedule: Schedule,
    spaces: Sequence[Sequence[Space]],
    streams: Sequence[Sequence[StreamStep]],
    fragments: int,
) -> None:
    """Raise WrongError unless the groups are closed and the streams reach the goal."""
    keys = [
        [(step.round, step.part) for step in own if isinstance(step, Group)]
        for own in streams
    ]
    for own in keys:
        needs(own == sorted({*own}), "order of groups")
    for in_place in (False, True):
        memories = [
            Memory(schedule, spaces, in_place=in_place) for _ in range(fragments)
        ]
        todo = [list(own) for own in streams]
        for key in sorted({key for own in keys for key in own}):
            moving = []
            for rank, left in enumerate(todo):
                _work(rank, left, memories)
                if left and (left[0].round, left[0].part) == key:
                    moving.append((rank, left.pop(0)))
            _move(moving, memories, spaces)
        for rank, left in enumerate(todo):
            _work(rank, left, memories)
            needs(not left, "a group that never comes")
        for memory in memories:
            memory.check()


def _work(rank: int, left: list[StreamStep], memories: Sequence[Memory]) -> None:
    while left and not isinstance(left[0], Group):
        fragment, (kind, dst, src) = left.pop(0)
        memory = memories[fragment]
        value = memory.read(rank, src)
        like = dst.like if isinstance(dst, Slot) else dst
        needs(len(value) == like.hi - like.lo, "lengths")
        if kind == "reduce":
            # Kernels take their operands in any order.
            memory.rule = "none" if memory.rule == "none" else "commutative"
            value = memory.combined(memory.read(rank, dst), value)
        memory.write(rank, dst, value)


def _move(
    moving: Sequence[tuple[int, Group]],
    memories: Sequence[Memory],
    spaces: Sequence[Sequence[Space]],
) -> None:
    sent: dict[tuple[int, int], list[tuple[int, int, Held]]] = defaultdict(list)
    recvs: dict[tuple[int, int], list[tuple[int, int, Place]]] = defaultdict(list)
    for rank, group in moving:
        places = set[object]()
        for fragment, (peer, k, place) in group.sends:
            value = memories[fragment].read(rank, place)
            sent[rank, peer].append((fragment, k, value))
            places |= _taken(fragment, place, spaces[rank])
        for fragment, (peer, k, place) in group.recvs:
            recvs[peer, rank].append((fragment, k, place))
            taken = _taken(fragment, place, spaces[rank])
            needs(not places & taken, "disturbed")
            places |= taken
    needs(sent.keys() == recvs.keys(), "not closed")
    for (source, target), messages in sent.items():
        needs(
            [one[:2] for one in messages] == [one[:2] for one in recvs[source, target]],
            "not closed",
        )
        for (fragment, _, value), (*_, place) in zip(
            messages, recvs[source, target], strict=True
        ):
            memories[fragment].write(target, place, value)


def _taken(fragment: int, place: Place, spaces: Sequence[Space]) -> set[object]:
    if isinstance(place, Slot):
        return {(fragment, "slot", place.number)}
    return {(fragment, block) for block in _blocks(spaces, place)}
