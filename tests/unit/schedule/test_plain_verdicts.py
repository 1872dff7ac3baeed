# SPDX-License-Identifier: Apache-2.0
"""The native checks and plain Python say the same of right and of mutated schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from plain_verdicts import check_lowered, check_steps, check_streams, verdict

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.nccl.config import GroupShape
from commrt.schedule import verify_lowered as lowered_module
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice, Step
from commrt.schedule.lower import LOCAL, Lowered, lower
from commrt.schedule.rounds import Group, RankRounds, lower_to_rounds, sequence
from commrt.schedule.rounds import Step as StreamStep
from commrt.schedule.verify import verify
from commrt.schedule.verify_lowered import verify_lowered
from commrt.schedule.verify_rounds import check_rounds
from commrt.vocabulary.operations import SCHEDULED

MUTANTS = 6
MATCHED = [
    (coll, name)
    for coll in SCHEDULED
    for name in algorithms.names(coll, 4)
    if not algorithms.get(coll, name).spans_nodes
]
SOUND = (
    # A rule that is stricter than what one run in place shows.
    "in place they are the same memory",
    # Plain Python tries some lengths, the native check proves all.
    "has another length",
)


def drawn(coll: str, name: str, draw: Random) -> Schedule:
    """Return a schedule on few ranks, with drawn parameters."""
    size = draw.choice(
        [n for n in range(2, 9) if algorithms.get(coll, name).supports(n)]
    )
    choices = algorithms.param_choices(coll, name, size)
    params = {key: draw.choice(values) for key, values in choices.items()}
    return algorithms.schedule(coll, name, size, draw.randrange(size), params)


def native_verdict(check: object) -> bool | None:
    """Return whether a native check passes; None where its rule is stricter."""
    try:
        check()  # type: ignore[operator]
    except ScheduleError as error:
        return None if any(said in str(error) for said in SOUND) else False
    return True


def shifted(where: Slice | None, draw: Random) -> Slice | None:
    if where is None:
        return None
    by = draw.choice((-1, 1))
    return where._replace(lo=where.lo + by, hi=where.hi + by)


def mutated_step(step: Step, size: int, draw: Random) -> Step:
    """Return a step with one thing changed."""
    kind = draw.randrange(6)
    if kind == 0 and step.deps:
        gone = draw.choice(step.deps)
        return step._replace(deps=tuple(dep for dep in step.deps if dep != gone))
    if kind == 1:
        return step._replace(src=shifted(step.src, draw))
    if kind == 2:
        return step._replace(dst=shifted(step.dst, draw))
    if kind == 3 and step.op is Op.RRED:
        return step._replace(op=Op.RECV, src=None)
    if kind == 4 and step.op in (Op.COPY, Op.RED):
        return step._replace(op=Op.RED if step.op is Op.COPY else Op.COPY)
    if kind == 5 and step.peer >= 0:
        return step._replace(peer=draw.randrange(size))
    return step


def mutated(schedule: Schedule, draw: Random) -> Schedule:
    """Return the schedule with a step of one rank changed, or two exchanged."""
    rank = draw.randrange(schedule.size)
    programs = [*schedule.programs()]
    steps = list(programs[rank].steps)
    if len(steps) > 1 and draw.random() < 0.25:
        at = draw.randrange(len(steps) - 1)
        first, second = steps[at + 1], steps[at]
        # Each keeps what it waits for, but not one for the other.
        first = first._replace(deps=tuple(dep for dep in first.deps if dep != at))
        steps[at : at + 2] = first, second
    elif steps:
        at = draw.randrange(len(steps))
        steps[at] = mutated_step(steps[at], schedule.size, draw)
    made = RankProgram(rank, programs[rank].spaces)
    for step in steps:
        made.steps.append(step)
    programs[rank] = made
    return replace(
        schedule, algorithm="mutant", make_program=programs.__getitem__, _programs={}
    )


@pytest.mark.full(sample=20)
@pytest.mark.parametrize(("coll", "name"), MATCHED)
def test_steps(coll: str, name: str, seed: int) -> None:
    draw = Random(f"{seed} {coll} {name}")
    right = drawn(coll, name, draw)
    assert verdict(lambda: check_steps(right))
    verify(right)
    for _ in range(MUTANTS):
        mutant = mutated(right, draw)
        native = native_verdict(lambda: verify(mutant))  # noqa: B023
        plain = verdict(lambda: check_steps(mutant))  # noqa: B023
        assert native in (None, plain), mutant.to_json()


def changed_rows(one: Lowered, draw: Random) -> Lowered:
    """Return a lowered program with one number changed, or one dependency left out."""
    if len(one.deps) and draw.random() < 0.4:
        gone = draw.randrange(len(one.deps))
        pointers = one.dep_ptr - (one.dep_ptr > gone).astype(np.int32)
        return replace(one, deps=np.delete(one.deps, gone), dep_ptr=pointers)
    which = draw.choice(["inputs", "outputs"])
    table = getattr(one, which).copy()
    if len(table):
        row = table[draw.randrange(len(table))]
        if row[0] == LOCAL:
            by = draw.choice((-1, 1))
            blocks = one.spaces[row[1]].nblk
            within = row[2] + by >= 0 and row[3] + by <= blocks
            row[2:4] += by if within else 0
        else:
            row[2] = max(0, row[2] + draw.choice((-1, 1)))
    return replace(one, **{which: table})


@pytest.mark.full(sample=20)
@pytest.mark.parametrize(("coll", "name"), MATCHED)
def test_lowered_programs(
    coll: str, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Random(f"{seed} {coll} {name}")
    schedule = drawn(coll, name, draw)
    right = [lower(schedule, rank) for rank in range(schedule.size)]
    check_lowered(schedule, right)
    verify_lowered(schedule)
    for _ in range(MUTANTS):
        rank = draw.randrange(schedule.size)
        programs = [*right]
        programs[rank] = changed_rows(right[rank], draw)
        monkeypatch.setattr(
            lowered_module,
            "lower",
            lambda schedule, rank, fuses: programs[rank],  # noqa: B023
        )
        native = verdict(lambda: verify_lowered(schedule))
        plain = verdict(lambda: check_lowered(schedule, programs))  # noqa: B023
        assert native == plain, (schedule.params, rank, programs[rank])


Streams = Sequence[Sequence[StreamStep]]


def changed_stream(own: Sequence[StreamStep], draw: Random) -> list[StreamStep]:
    """Return a stream with two steps exchanged, one left out, or a place changed."""
    steps = [*own]
    at = draw.randrange(len(steps))
    kind = draw.randrange(4)
    step = steps[at]
    if kind == 0 and at:
        steps[at - 1 : at + 1] = step, steps[at - 1]
    elif kind == 1 and not isinstance(step, Group):
        del steps[at]
    elif not isinstance(step, Group):
        fragment, work = step
        place = draw.choice(("dst", "src"))
        other = draw.choice([each for each in steps if not isinstance(each, Group)])[1]
        steps[at] = fragment, work._replace(**{place: getattr(other, place)})
    elif kind == 2 and step.recvs:
        which = draw.randrange(len(step.recvs))
        fragment, message = step.recvs[which]
        _, other_message = draw.choice(step.recvs)
        moved = (fragment, message._replace(place=other_message.place))
        recvs = (*step.recvs[:which], moved, *step.recvs[which + 1 :])
        steps[at] = replace(step, recvs=recvs)
    return steps


def streams(
    rounds: Sequence[RankRounds], fragments: int, shape: GroupShape
) -> list[list[StreamStep]]:
    size = len(rounds)
    return [
        sequence(own, size, fragments=fragments, lag=1, shape=shape) for own in rounds
    ]


@pytest.mark.full(sample=20)
@pytest.mark.parametrize(("coll", "name"), MATCHED)
def test_streams(coll: str, name: str, seed: int) -> None:
    draw = Random(f"{seed} {coll} {name}")
    schedule = drawn(coll, name, draw)
    rounds = lower_to_rounds(schedule)
    spaces = [own.spaces for own in rounds]
    shape = draw.choice((GroupShape.of(schedule.size), GroupShape(2, 1)))
    once, right = (streams(rounds, fragments, shape) for fragments in (1, 3))
    check_streams(schedule, spaces, right, 3)
    check_rounds(schedule, rounds, once, shape)
    check_rounds(schedule, rounds, right, shape, once)
    for _ in range(MUTANTS):
        rank = draw.randrange(schedule.size)
        mutant: list[Sequence[StreamStep]] = [*right]
        if not right[rank]:
            continue
        mutant[rank] = changed_stream(right[rank], draw)
        plain = verdict(
            lambda: check_streams(schedule, spaces, mutant, 3)  # noqa: B023
        )
        for known in ((), once):
            native = native_verdict(
                lambda: check_rounds(schedule, rounds, mutant, shape, known)  # noqa: B023
            )
            assert native in (None, plain), (schedule.params, rank, mutant[rank])
