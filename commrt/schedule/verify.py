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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from commrt import _native
from commrt.errors import ScheduleError
from commrt.schedule.columns import RULES, operation_goal, step_programs
from commrt.schedule.dependencies import locations
from commrt.schedule.execute import explained, match
from commrt.schedule.faults import of_contents
from commrt.schedule.ir import (
    Op,
    RankProgram,
    Schedule,
    Slice,
    Space,
    Step,
)
from commrt.schedule.space_tables import block_width
from commrt.vocabulary.operations import operation

__all__ = ["Report", "check_input_lasts", "race", "verify"]


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
        raise ScheduleError(f"{what}: {exc}", exc.places) from exc


def _verify(schedule: Schedule) -> Report:
    programs = schedule.programs()
    _check_spaces(schedule, programs)
    native = step_programs(programs, schedule.length_unit)
    try:
        native.check_well_formed()
        with explained(programs):
            native.partners()
        native.check_lengths()
        native.check_input_lasts()
        native.check_races()
        with explained(programs):
            longest = native.longest_chain()
        native.check_meaning(operation_goal(schedule), RULES[schedule.redop_class])
    except _native.ScheduleFaultError as fault:
        said, places = _said(schedule, programs, fault), _places(programs, fault)
        raise ScheduleError(said, places) from None
    return _report(programs, native, longest)


def _said(
    schedule: Schedule,
    programs: Sequence[RankProgram],
    fault: _native.ScheduleFaultError,
) -> str:
    """Return what the native checks found wrong, in words."""
    kind, numbers, contents = fault.args
    if kind == "ends":
        return of_contents(kind, numbers, contents)
    rank, index, *others = numbers
    program = programs[rank]
    if kind == "step":
        return _problem_of(schedule, program, index)
    if kind == "race":
        return race(program.describe_step(index), program.describe_step(others[0]))
    if kind == "gone":
        return _gone(program, index, others[0])
    if kind == "lengths":
        other = programs[others[0]]
        return (
            f"{program.describe_step(index)}: {other.describe(Slice(*others[1:]))} of "
            f"rank {others[0]} has another length, at least for some lengths of the "
            f"vector; both ends of a message need the same"
        )
    return f"{program.describe_step(index)}: {of_contents(kind, others, contents)}"


def _places(
    programs: Sequence[RankProgram], fault: _native.ScheduleFaultError
) -> list[tuple[int, int]]:
    """Return rank and number of the steps that a fault is about."""
    kind, (rank, number, *others), _ = fault.args
    if kind in ("step", "gone"):
        return [(rank, number)]
    if kind == "race":
        return [(rank, number), (rank, others[0])]
    if kind == "ends":
        # The number is that of a block of out, and its last writer is the suspect.
        writers = [
            index
            for index, step in enumerate(programs[rank].steps)
            if step.dst and step.dst.space == 1 and step.dst.lo <= number < step.dst.hi
        ]
        number = writers[-1] if writers else -1
    # A message that is wrong here may be wrong at its other end.
    other = match(programs).get((rank, number))
    return [(rank, number)] if other is None else [(rank, number), other]


# Well-formed


def _check_spaces(schedule: Schedule, programs: Sequence[RankProgram]) -> None:
    multiple = schedule.length_unit
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
            shape = (block_width(space, multiple), space.nblk)
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


def _problem_of(schedule: Schedule, program: RankProgram, index: int) -> str:
    step = program.steps[index]
    problem = _problem(program, index, step, schedule.size) or _overlap(
        locations(program.spaces), step
    )
    assert problem, "the native check finds what this one does"
    return f"rank {program.rank} step {index} ({step.op.name.lower()}): {problem}"


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


def check_input_lasts(program: RankProgram) -> None:
    """Raise ScheduleError if a block of ``in`` is read after ``out`` took its place."""
    try:
        step_programs([program]).check_input_lasts()
    except _native.ScheduleFaultError as fault:
        raise ScheduleError(_gone(program, *fault.args[1][1:])) from None


def _gone(program: RankProgram, index: int, block: int) -> str:
    return (
        f"{program.describe_step(index)}: it reads in[{block}], but out[{block}] was "
        f"written before: in place they are the same memory, so read it first"
    )


def race(one: str, other: str) -> str:
    """Return what is wrong where two accesses are not ordered."""
    return (
        f"race: {one} and {other} touch the same block, and neither waits for the "
        f"other; let one come after the other"
    )


# Report


def _report(
    programs: Sequence[RankProgram], native: _native.StepPrograms, longest: int
) -> Report:
    sent = [Fraction(0)]
    most = 0
    for rank, program in enumerate(programs):
        blocks, messages = native.sent(rank)
        widths = Counter[tuple[int, int]]()
        for space, count in zip(program.spaces, blocks, strict=True):
            if count and space.split == "even":
                widths[space.scale[0], space.scale[1] * space.nblk] += count
        sent.append(_total(widths))
        most = max(most, messages)
    scratch = max(map(_scratch, {program.spaces for program in programs}))
    return Report(native.num_steps, longest, max(sent), scratch, most)


def _scratch(spaces: Sequence[Space]) -> Fraction:
    """Return the scratch of a rank, as a part of the full vector."""
    lengths = Counter(space.scale for space in spaces if space.kind == "tmp")
    return _total(lengths)


def _total(parts: Mapping[tuple[int, int], int]) -> Fraction:
    """Return the sum of fractions, each so many times."""
    return sum((n * Fraction(*part) for part, n in parts.items()), Fraction(0))
