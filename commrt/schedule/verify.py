# SPDX-License-Identifier: Apache-2.0
"""Prove a schedule right before it moves a byte.

``verify`` checks what the algorithm's author wrote:

- *well-formed*: slices in range, peers valid, dependencies earlier;
- *matched*: the k-th send to a rank meets its k-th receive, with equal lengths for
every length of the vector;
- *deadlock-free* even if every send waits for its receive;
- *race-free*: steps that touch the same block, one writing, are ordered, also when the
operation works in place;
- *meaning*: every contribution is in the result exactly once (and in rank order, if the
algorithm says so), in place and out of place.

If the first four hold, every execution gives the same result, so one symbolic run
proves all interleavings. ``verify_lowered`` in ``verify_lowered.py`` does the same for
what the engine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from commrt.errors import ScheduleError
from commrt.schedule.dependencies import DependencyTracker, locations
from commrt.schedule.execute import Event, Execution, Place, match
from commrt.schedule.goals import Content, Goal
from commrt.schedule.ir import (
    Op,
    RankProgram,
    RedopClass,
    Schedule,
    Slice,
    Space,
    Step,
    full_multiple,
)
from commrt.vocabulary.operations import operation

__all__ = [
    "BlockLengths",
    "Report",
    "SymbolicMemory",
    "check_input_lasts",
    "check_races",
    "combine",
    "verify",
]


@dataclass(frozen=True)
class Report:
    """Costs of a correct schedule."""

    num_steps: int
    """Steps of all ranks together."""
    critical_path: int
    """Messages on the longest chain of dependent messages."""
    sent: Fraction
    """Bytes sent by the busiest rank, as a part of the full vector."""
    scratch: Fraction
    """Scratch of the hungriest rank before fusion, as a part of the full vector."""
    max_messages: int
    """Most messages from one rank to one other."""


def verify(schedule: Schedule) -> Report:
    """Check ``schedule`` and return its costs, or raise ScheduleError."""
    try:
        return _verify(schedule)
    except ScheduleError as exc:
        root = f", root {schedule.root}" if operation(schedule.coll).has_root else ""
        what = f"{schedule.coll} {schedule.algorithm} on {schedule.size} ranks{root}"
        raise ScheduleError(f"{what}: {exc}") from exc


def _verify(schedule: Schedule) -> Report:
    programs = schedule.programs()
    _check_spaces(schedule, programs)
    for program in programs:
        _check_steps(program, schedule.size)
    partners = match(programs)
    _check_lengths(schedule, programs, partners)
    for program in programs:
        check_input_lasts(program)
        accesses = [_access(step) for step in program.steps]
        deps = [step.deps for step in program.steps]
        check_races(program.spaces, accesses, deps, program.describe_step)
    execution = Execution(programs, partners)
    _check_meaning(schedule, programs, execution)
    return _report(programs, execution)


# Well-formed


def _check_spaces(schedule: Schedule, programs: Sequence[RankProgram]) -> None:
    multiple = full_multiple(schedule.coll, schedule.size)
    widths: dict[str, tuple[Fraction | None, int]] = {}
    for rank, program in enumerate(programs):
        kinds = [space.kind for space in program.spaces]
        if program.rank != rank or kinds[:2] != ["in", "out"] or {*kinds[2:]} - {"tmp"}:
            raise ScheduleError(
                f"rank {rank}: its program is for rank {program.rank} with spaces of "
                f"kind {', '.join(kinds)}; expected in, out and then tmp"
            )
        for space in program.spaces:
            if space.split == "even" and multiple * space.scale[0] % space.scale[1]:
                raise ScheduleError(
                    f"rank {rank}: {space.name}, {Fraction(*space.scale)} of the full "
                    f"vector, is not a whole number of elements for every length"
                )
            if space.kind == "tmp" or not space.nblk:
                continue
            shape = (_width(space, multiple), space.nblk)
            if widths.setdefault(space.name, shape) != shape:
                raise ScheduleError(
                    f"rank {rank}: {space.name} has {space.nblk} blocks, on another "
                    f"rank {widths[space.name][1]}; call blocks() with one number on "
                    f"all ranks"
                )
    if len({width for width, _ in widths.values()}) > 1:
        raise ScheduleError(
            "blocks of in and out have different lengths; expected the same, so that "
            "a step can copy one into the other"
        )


def _check_steps(program: RankProgram, size: int) -> None:
    first = locations(program.spaces)
    for index, step in enumerate(program.steps):
        problem = _problem(program, index, step, size) or _overlap(first, step)
        if problem:
            raise ScheduleError(
                f"rank {program.rank} step {index} ({step.op.name.lower()}): {problem}"
            )


_NEEDS = {
    Op.SEND: (True, False, True),
    Op.RECV: (False, True, True),
    Op.RRED: (True, True, True),
    Op.RED: (True, True, False),
    Op.COPY: (True, True, False),
}
"""True if an op has src, dst, peer."""


def _problem(program: RankProgram, index: int, step: Step, size: int) -> str | None:
    has = (step.src is not None, step.dst is not None, step.peer >= 0)
    if has != _NEEDS[step.op]:
        return f"src, dst, peer given: {has}, expected {_NEEDS[step.op]}"
    if step.peer == program.rank or step.peer >= size:
        return f"peer {step.peer} is not another rank below {size}"
    if any(not 0 <= dep < index for dep in step.deps):
        return f"it waits for steps {step.deps}, which are not all earlier"
    for end in (step.src, step.dst):
        if end is None:
            continue
        known = 0 <= end.space < len(program.spaces)
        nblk = program.spaces[end.space].nblk if known else 0
        if not 0 <= end.lo < end.hi <= nblk:
            return f"{program.describe(end)} is not within its {nblk} blocks"
    if step.dst and program.spaces[step.dst.space].kind == "in":
        return f"it writes {program.describe(step.dst)}, the caller's input"
    return None


def check_input_lasts(program: RankProgram) -> None:
    """Raise ScheduleError if a block of ``in`` is read after ``out`` took its place."""
    inp, out = program.spaces[:2]
    if out.alias != inp.name or out.nblk != inp.nblk:
        return
    gone: set[int] = set()
    for index, step in enumerate(program.steps):
        src, dst = step.src, step.dst
        if src and src.space == 0 and (lost := gone.intersection(range(*src[1:]))):
            block = min(lost)
            raise ScheduleError(
                f"{program.describe_step(index)}: it reads in[{block}], but "
                f"out[{block}] was written before: in place they are the same memory, "
                f"so read it first"
            )
        if dst is None or dst.space != 1:
            continue
        if step.op is not Op.COPY or src is None or src != (0, dst.lo, dst.hi):
            gone.update(range(dst.lo, dst.hi))


def _overlap(first: Sequence[int], step: Step) -> str | None:
    """Say the fault of a step's source and destination together."""
    src, dst = step.src, step.dst
    if src is None or dst is None:
        return None
    if src.hi - src.lo != dst.hi - dst.lo:
        return f"{src.hi - src.lo} blocks into {dst.hi - dst.lo}"
    # Block by block they may be the same memory, also in place; but not shifted.
    shift = first[src.space] + src.lo - first[dst.space] - dst.lo
    if 0 < abs(shift) < src.hi - src.lo:
        return f"source {src.lo}:{src.hi} and destination {dst.lo}:{dst.hi} overlap"
    return None


# Matched


def _width(space: Space, multiple: int) -> Fraction | None:
    """Return the length of a block per element of N/multiple; None if irregular."""
    if space.split != "even":
        return None
    return Fraction(space.scale[0] * multiple, space.scale[1] * max(space.nblk, 1))


class BlockLengths:
    """True if slices of different ranks are equally long for every vector."""

    def __init__(self, schedule: Schedule, spaces: Sequence[Sequence[Space]]) -> None:
        multiple = full_multiple(schedule.coll, schedule.size)
        self._spaces = spaces
        self._widths = [[_width(space, multiple) for space in own] for own in spaces]

    def agree(self, rank: int, src: Slice, other: int, dst: Slice) -> bool:
        """Return whether ``src`` is always as long as ``dst`` of rank ``other``."""
        width = self._widths[rank][src.space]
        if src.hi - src.lo != dst.hi - dst.lo:
            return False
        if width != self._widths[other][dst.space]:
            return False
        if width is None:
            return _same_irregular(
                self._spaces[rank][src.space], src, self._spaces[other][dst.space], dst
            )
        # floor(b w n) - floor(a w n) agrees for every n if a shift is whole, or w is.
        shift = (src.lo - dst.lo) * width.numerator
        return shift % width.denominator == 0


def _check_lengths(
    schedule: Schedule, programs: Sequence[RankProgram], partners: dict[Place, Place]
) -> None:
    lengths = BlockLengths(schedule, [program.spaces for program in programs])
    for program in programs:
        for index, step in enumerate(program.steps):
            other = program.rank, step.dst
            if step.op is Op.SEND:
                rank, position = partners[program.rank, index]
                other = (rank, programs[rank].steps[position].dst)
            if step.src is None or other[1] is None:
                continue
            if not lengths.agree(program.rank, step.src, other[0], other[1]):
                raise ScheduleError(
                    f"{program.describe_step(index)}: "
                    f"{programs[other[0]].describe(other[1])} of rank {other[0]} has "
                    f"another length, at least for some lengths of the vector; both "
                    f"ends of a message need the same"
                )


def _same_irregular(space: Space, src: Slice, other: Space, dst: Slice) -> bool:
    mine, theirs = space.counts or space.cap, other.counts or other.cap
    if space.split != other.split or mine is None or theirs is None:
        return space.split == other.split and src[1:] == dst[1:]
    return mine[src.lo : src.hi] == theirs[dst.lo : dst.hi]


# Race-free


def _access(step: Step) -> tuple[list[Slice], list[Slice]]:
    reads = [step.src] if step.src else []
    if step.op is Op.RED and step.dst:
        reads.append(step.dst)
    return reads, [step.dst] if step.dst else []


def check_races(
    spaces: Sequence[Space],
    accesses: Sequence[tuple[list[Slice], list[Slice]]],
    deps: Sequence[Sequence[int]],
    describe: Callable[[int], str],
) -> None:
    """Raise ScheduleError unless conflicting accesses are ordered by ``deps``."""
    tracker = DependencyTracker(spaces)
    for index, (reads, writes) in enumerate(accesses):
        missing = tracker.access(index, reads, writes).difference(deps[index])
        if not missing:
            continue
        unordered = missing - _ancestors(index, deps, min(missing))
        if unordered:
            raise ScheduleError(
                f"race: {describe(index)} and {describe(max(unordered))} touch the "
                f"same block, and neither waits for the other; let one come after the "
                f"other"
            )


def _ancestors(index: int, deps: Sequence[Sequence[int]], first: int) -> set[int]:
    found: set[int] = set()
    todo = list(deps[index])
    while todo:
        item = todo.pop()
        if item >= first and item not in found:
            found.add(item)
            todo.extend(deps[item])
    return found


# Meaning


class SymbolicMemory:
    """The contents of every rank's blocks; ``in`` and ``out`` shared or not."""

    def __init__(
        self, goal: Goal, spaces: Sequence[Sequence[Space]], *, in_place: bool
    ) -> None:
        self.contents: list[list[list[Content | None]]] = []
        for rank, own in enumerate(spaces):
            held: list[list[Content | None]] = []
            for number, space in enumerate(own):
                shared = in_place and space.alias and space.nblk == own[0].nblk
                if number == 0:
                    held.append([*goal.initial(rank, space.nblk)])
                else:
                    held.append(held[0] if shared else [None] * space.nblk)
            self.contents.append(held)

    def read(self, rank: int, where: Slice) -> list[Content]:
        """Return the content of ``where``; ScheduleError if it holds nothing."""
        found = self.contents[rank][where.space][where.lo : where.hi]
        if None in found:
            block = where.lo + found.index(None)
            raise ScheduleError(
                f"it reads block {block}, which holds nothing yet; write it first"
            )
        return [content for content in found if content is not None]

    def write(self, rank: int, where: Slice, values: list[Content]) -> None:
        """Store ``values``."""
        self.contents[rank][where.space][where.lo : where.hi] = values

    def check(self, goal: Goal, rank: int) -> None:
        """Raise ScheduleError unless ``out`` of ``rank`` holds what it must."""
        out = self.contents[rank][1]
        for block, (held, wanted) in enumerate(
            zip(out, goal.final(rank, len(out)), strict=True)
        ):
            if held != wanted:
                raise ScheduleError(
                    f"rank {rank} block out[{block}] ends with {_describe(held)}, "
                    f"expected {_describe(wanted)}"
                )


def _describe(content: Content | None) -> str:
    if content is None:
        return "nothing"
    part, bits = content
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    shown = ", ".join(ranks) if len(ranks) <= 8 else f"{', '.join(ranks[:7])}, …"
    return f"part {part} from rank{'s' if len(ranks) > 1 else ''} {shown}"


def combine(
    first: list[Content],
    second: list[Content],
    redop_class: RedopClass,
    *,
    idempotent: bool,
) -> list[Content]:
    """Return the contents of ``first ⊕ second``, or raise ScheduleError."""
    result = []
    for a, b in zip(first, second, strict=True):
        if a[0] != b[0]:
            raise ScheduleError(
                f"it reduces {_describe(a)} with {_describe(b)}; expected the same "
                f"part of both"
            )
        if redop_class == "none" and not idempotent:
            raise ScheduleError(
                "it reduces, but the operation has no reduction; copy or receive "
                "instead"
            )
        if a[1] & b[1] and not idempotent:
            twice = (a[0], a[1] & b[1])
            raise ScheduleError(
                f"it reduces {_describe(twice)} a second time; each rank may count once"
            )
        if (
            redop_class == "ordered"
            and a[1].bit_length() != (b[1] & -b[1]).bit_length() - 1
        ):
            raise ScheduleError(
                f"out of rank order: {_describe(a)}, then {_describe(b)}"
            )
        result.append((a[0], a[1] | b[1]))
    return result


def _check_meaning(
    schedule: Schedule, programs: Sequence[RankProgram], execution: Execution
) -> None:
    goal = Goal(schedule.coll, schedule.size, schedule.root)
    spaces = [program.spaces for program in programs]
    modes = (False, True) if operation(schedule.coll).in_place else (False,)
    memories = [SymbolicMemory(goal, spaces, in_place=mode) for mode in modes]
    steps = [list(program.steps) for program in programs]
    for event in execution:
        (rank, index), _ = event
        try:
            # Equal messages either way: then any mixture of ranks in place is right.
            sent = [
                _perform(memory, steps, event, schedule.redop_class, goal)
                for memory in memories
            ]
            if sent[0] != sent[-1]:
                raise ScheduleError(
                    "in place, where in and out are the same memory, it sends "
                    "something else; read in before out is written"
                )
        except ScheduleError as exc:
            raise ScheduleError(
                f"{programs[rank].describe_step(index)}: {exc}"
            ) from exc
    for memory in memories:
        for rank in range(schedule.size):
            memory.check(goal, rank)


def _perform(
    memory: SymbolicMemory,
    steps: Sequence[Sequence[Step]],
    event: Event,
    redop_class: RedopClass,
    goal: Goal,
) -> list[Content]:
    """Carry out a local step or a message; return what was moved."""
    (rank, index), sender = event
    step = steps[rank][index]
    assert step.dst is not None
    if sender is not None:
        source = steps[sender[0]][sender[1]].src
        assert source is not None
        moved = memory.read(sender[0], source)
    else:
        assert step.src is not None
        moved = memory.read(rank, step.src)
    result = moved
    if step.op in (Op.RRED, Op.RED):
        own = step.src if step.op is Op.RRED else step.dst
        assert own is not None
        operands = [memory.read(rank, own), moved]
        if step.op is Op.RRED and step.peer < rank:
            operands.reverse()
        result = combine(
            operands[0], operands[1], redop_class, idempotent=goal.idempotent
        )
    memory.write(rank, step.dst, result)
    return moved


# Report


def _report(programs: Sequence[RankProgram], execution: Execution) -> Report:
    sent = [Fraction(0)]
    scratch = [Fraction(0)]
    most = 0
    for program in programs:
        blocks: dict[int, int] = {}
        messages: dict[int, int] = {}
        for step in program.steps:
            if step.op is Op.SEND and step.src:
                where = step.src
                count = blocks.get(where.space, 0) + where.hi - where.lo
                blocks[where.space] = count
                messages[step.peer] = messages.get(step.peer, 0) + 1
        total = Fraction(0)
        for space, count in blocks.items():
            total += count * (_width(program.spaces[space], 1) or Fraction(0))
        sent.append(total)
        tmp = [Fraction(*each.scale) for each in program.spaces if each.kind == "tmp"]
        scratch.append(sum(tmp, Fraction(0)))
        most = max(most, 0, *messages.values())
    return Report(
        sum(len(program.steps) for program in programs),
        execution.num_steps,
        max(sent),
        max(scratch),
        most,
    )
