# SPDX-License-Identifier: Apache-2.0
"""Closed rounds: every schedule has them, and what is not closed or wrong is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_cases import EVERY, schedules

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.nccl.config import GroupShape
from commrt.schedule.ir import Schedule, Slice
from commrt.schedule.nodes import parse_nodes
from commrt.schedule.rounds import (
    Group,
    Message,
    Slot,
    Step,
    Work,
    lower_to_rounds,
    sequence,
)
from commrt.schedule.verify_rounds import check_rounds, verify_rounds
from commrt.vocabulary.operations import operation

SMALL = GroupShape(distances=2, messages=1)


@pytest.mark.parametrize(("coll", "name"), EVERY)
def test_rounds_of_1_to_33_ranks(coll: str, name: str, seed: int, full: bool) -> None:
    """A few of the sizes from 6 on, other ones in each run; all in a full run."""
    rng = random.Random(f"{coll} {name} {seed}")
    drawn = [rng.randint(4, 9), rng.randint(10, 33)]
    for size in range(1, 34) if full else (1, 2, 3, *drawn):
        several = list(schedules(coll, name, size))
        few = rng.sample(several, min(len(several), 3 if size < 10 else 1))
        for schedule in several if full else few:
            report = verify_rounds(schedule, fragments=rng.choice([1, 2, 3]))
            assert (report.num_rounds > 0) == (size > 1)


@pytest.mark.parametrize(("coll", "name"), EVERY)
def test_small_groups_and_any_lag(coll: str, name: str, seed: int) -> None:
    rng = random.Random(f"{coll} {name} {seed}")
    for size in (2, rng.randint(3, 8)):
        for schedule in [*schedules(coll, name, size)][:1]:
            lag = rng.randint(1, 4)
            report = verify_rounds(schedule, fragments=4, lag=lag, shape=SMALL)
            assert report.most_calls <= SMALL.most_calls


@pytest.mark.parametrize("coll", ["allreduce", "bcast", "allgather", "reduce"])
def test_rounds_of_two_levels(coll: str) -> None:
    for counts in ((2, 2), (1, 3), (3, 2, 1)):
        nodes = parse_nodes(counts)
        for name in algorithms.names(coll, len(nodes), nodes):
            root = len(nodes) - 1 if operation(coll).has_root else 0
            schedule = algorithms.schedule(coll, name, len(nodes), root, {}, nodes)
            verify_rounds(schedule)


def test_rounds_are_the_longest_chain_of_messages() -> None:
    def rounds(coll: str, name: str, size: int) -> int:
        return verify_rounds(algorithms.schedule(coll, name, size)).num_rounds

    assert rounds("allreduce", "ring", 8) == 14
    assert rounds("allreduce", "recursive_doubling", 8) == 3
    assert rounds("alltoall", "direct", 33) == 1
    assert rounds("bcast", "binomial", 16) == 4


def test_messages_go_straight_to_where_they_are_wanted() -> None:
    """Of what only moves nothing is copied, but for a rank's own block."""
    for coll, name in (("bcast", "binomial"), ("allgather", "ring")):
        for own in lower_to_rounds(algorithms.schedule(coll, name, 5)):
            assert not [
                message
                for ends in own.recvs
                for message in ends
                if isinstance(message.place, Slot)
            ]
            assert sum(map(len, own.work)) <= 1


Steps = list[list[Step]]
Change = Callable[[Steps], None]


def _first(steps: list[Step], which: str) -> tuple[int, Group]:
    return next(
        (i, step)
        for i, step in enumerate(steps)
        if isinstance(step, Group) and getattr(step, which)
    )


def later_at_one_end(steps: Steps) -> None:
    """Rank 0 receives its first message a round later."""
    at, group = _first(steps[0], "recvs")
    steps[0][at] = replace(group, recvs=group.recvs[1:])
    after, other = next(
        (i, step)
        for i, step in enumerate(steps[0])
        if i > at and isinstance(step, Group)
    )
    steps[0][after] = replace(other, recvs=(group.recvs[0], *other.recvs))


def not_received(steps: Steps) -> None:
    at, group = _first(steps[1], "recvs")
    steps[1][at] = replace(group, recvs=())


def other_order(steps: Steps) -> None:
    """Rank 0 runs its first two groups in the other order."""
    (a, one), (b, two) = [
        (i, step) for i, step in enumerate(steps[0]) if isinstance(step, Group)
    ][:2]
    steps[0][a], steps[0][b] = two, one


def over_what_is_sent(steps: Steps) -> None:
    at, group = _first(steps[0], "recvs")
    fragment, message = group.recvs[0]
    place = group.sends[0][1].place
    steps[0][at] = replace(
        group, recvs=((fragment, message._replace(place=place)), *group.recvs[1:])
    )


def other_length(steps: Steps) -> None:
    at, group = _first(steps[0], "sends")
    fragment, message = group.sends[0]
    longer = Message(message.peer, message.k, Slice(0, 0, 2))
    steps[0][at] = replace(group, sends=((fragment, longer), *group.sends[1:]))


def left_out(steps: Steps) -> None:
    """A reduction is left out."""
    steps[0].remove(next(s for s in steps[0] if _is(s, "reduce")))


def twice(steps: Steps) -> None:
    at = next(i for i, step in enumerate(steps[0]) if _is(step, "reduce"))
    steps[0].insert(at, steps[0][at])


def before_its_message(steps: Steps) -> None:
    at = next(
        i
        for i, step in enumerate(steps[0])
        if not isinstance(step, Group) and isinstance(step[1].src, Slot)
    )
    steps[0].insert(0, steps[0].pop(at))


def behind_the_send(steps: Steps) -> None:
    """What the last group of rank 0 sends is made only behind it."""
    at = max(
        i
        for i, step in enumerate(steps[0])
        if isinstance(step, Group) and step.sends and step.round > 0
    )
    works = [i for i in range(at) if not isinstance(steps[0][i], Group)]
    moved = [steps[0][i] for i in works]
    steps[0][:] = [s for i, s in enumerate(steps[0]) if i not in works] + moved


def _is(step: Step, kind: str) -> bool:
    return not isinstance(step, Group) and step[1].kind == kind


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ring", later_at_one_end, "not closed"),
        ("ring", not_received, "not closed"),
        ("ring", other_order, "in the order"),
        ("recursive_doubling", over_what_is_sent, "comes where"),
        ("ring", other_length, "another length"),
        ("ring", left_out, "ends with|holds nothing"),
        ("ring", twice, "a second time"),
        ("ring", before_its_message, "holds nothing"),
        ("ring", behind_the_send, "ends with|second time|holds nothing"),
    ],
)
@pytest.mark.parametrize("fragments", [1, 2])
def test_what_is_wrong_is_found(
    name: str, change: Change, said: str, fragments: int
) -> None:
    schedule: Schedule = algorithms.schedule("allreduce", name, 4)
    shape = GroupShape.of(4)
    rounds = lower_to_rounds(schedule)
    steps = [sequence(own, 4, fragments=fragments, shape=shape) for own in rounds]
    check_rounds(schedule, rounds, steps, shape)
    change(steps)
    with pytest.raises(ScheduleError, match=said):
        check_rounds(schedule, rounds, steps, shape)


def test_a_group_that_is_too_large_is_found() -> None:
    schedule = algorithms.schedule("alltoall", "direct", 8)
    rounds = lower_to_rounds(schedule)
    steps = [sequence(own, 8, shape=GroupShape(8, 6)) for own in rounds]
    check_rounds(schedule, rounds, steps, GroupShape(8, 6))
    with pytest.raises(ScheduleError, match="a group takes 4 and 1"):
        check_rounds(schedule, rounds, steps, GroupShape(4, 1))


def test_a_result_that_is_an_operand_is_reduced_where_it_is() -> None:
    """In place nothing is copied in a ring but what a slot holds is added."""
    for own in lower_to_rounds(algorithms.schedule("allreduce", "ring", 4)):
        copies = [w for each in own.work for w in each if w.kind == "copy"]
        for work in copies:
            assert isinstance(work, Work)
            assert isinstance(work.dst, Slice)
            assert isinstance(work.src, Slice)
            # in[i] to out[i]: in place a copy of a thing to itself
            assert work.src[1:] == work.dst[1:]
