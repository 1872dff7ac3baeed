# SPDX-License-Identifier: Apache-2.0
"""Who goes on after a change, and from which step."""

from __future__ import annotations

import random

import pytest

from commrt.elastic.members import Said, choose
from commrt.errors import RecoveryError

ARRAYS = ("model.weight: float32 (3, 4)",)


def said(
    done: int | None,
    part: int | None = 0,
    arrays: tuple[str, ...] = ARRAYS,
    steps: tuple[int, ...] | None = None,
) -> Said:
    if steps is None:
        steps = () if done is None else (done,)
    return Said(done, steps, part, arrays)


def test_all_go_back_to_the_last_step_that_all_completed() -> None:
    plan = choose([said(8), said(7), said(8)], 1)
    assert (plan.members, plan.step, plan.leavers) == ([0, 1, 2], 7, {})
    assert plan.sources == [1, 1, 1]
    assert plan.needs == [True, False, True]


def test_one_whose_step_cannot_be_undone_takes_it_from_another() -> None:
    plan = choose([said(7, steps=()), said(7), said(7)], 1)
    assert (plan.step, plan.sources[0], plan.needs) == (7, 1, [True, False, False])


def test_newcomers_get_the_state() -> None:
    plan = choose([said(7), said(7), said(None, None)], 1)
    assert (plan.members, plan.needs) == ([0, 1, 2], [False, False, True])


def test_where_no_state_is_whole_nobody_goes_on() -> None:
    with pytest.raises(RecoveryError, match="begun or made an update"):
        choose([said(7, steps=()), said(7, steps=())], 1)
    with pytest.raises(RecoveryError, match="begun or made an update"):
        choose([said(7, 0), said(8, 1)], 2)


def test_who_has_completed_a_step_can_return_to_its_begin() -> None:
    plan = choose([said(7, 0), said(8, 1, steps=(8, 7))], 2)
    assert (plan.step, plan.needs) == (7, [False, False])
    plan = choose([said(8, 0, steps=(8, 7)), said(8, 1, steps=(8, 7))], 2)
    assert plan.step == 8  # nobody has to
    # No rank has what the second one could return to.
    plan = choose([said(8, steps=(8,)), said(7, steps=())], 1)
    assert (plan.step, plan.needs) == (8, [False, True])


def test_a_model_of_other_shapes_is_left_out() -> None:
    other = ("model.weight: float32 (3, 5)",)
    plan = choose([said(7), said(7), said(None, None, other)], 1)
    assert plan.members == [0, 1]
    assert plan.leavers[2] == (
        "its model is another: model.weight: float32 (3, 4) (there), "
        "model.weight: float32 (3, 5) (here)"
    )


def test_whole_replicas_go_on() -> None:
    # Ranks 0 to 5 had three replicas of two parts; the second one's part 1 has died.
    plan = choose([said(7, 0), said(7, 1), said(7, 0), said(7, 0), said(7, 1)], 2)
    assert plan.members == [0, 1, 2, 4]
    assert plan.leavers == {3: "its replica lacks other ranks, and 2 go on"}
    assert plan.sources == [0, 1, 0, 1]


def test_parts_of_broken_replicas_make_a_whole_one() -> None:
    plan = choose([said(7, 0), said(7, 1)], 2)
    assert (plan.members, plan.leavers) == ([0, 1], {})


def test_without_a_part_nobody_goes_on() -> None:
    with pytest.raises(RecoveryError, match="no rank that lives has part 1 of 2"):
        choose([said(7, 0), said(7, 0), said(None, None)], 2)


def test_newcomers_fill_replicas_up() -> None:
    new = said(None, None)
    plan = choose([said(7, 0), said(7, 1), said(7, 0), new, new], 2)
    assert plan.members == [0, 1, 2, 3]
    assert plan.parts[3] == 1
    assert [*plan.leavers] == [4]
    assert plan.needs == [False, False, False, True]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_plans_of_all_kinds_hold_together(size: int) -> None:
    draw = random.Random(size)
    for _ in range(2000):
        parts = [draw.choice([None, *range(size)]) for _ in range(draw.randint(1, 9))]
        ranks = [
            said(None if part is None else draw.choice([None, 4, 5]), part)
            for part in parts
        ]
        try:
            plan = choose(ranks, size)
        except RecoveryError:
            steps = [
                {one.done for one in ranks if one.part == part and one.done is not None}
                for part in range(size)
            ]
            assert not set.intersection(*steps)
            continue
        assert len(plan.members) % size == 0
        assert plan.members
        assert sorted([*plan.members, *plan.leavers]) == list(range(len(ranks)))
        for number, rank in enumerate(plan.members):
            part = number % size
            assert plan.parts[rank] == part
            assert ranks[rank].part in (None, part)
            source = plan.members[plan.sources[number]]
            assert (ranks[source].part, ranks[source].done) == (part, plan.step)
            assert plan.needs[number] == (ranks[rank].done != plan.step)
        counts = [sum(one.part == part for one in ranks) for part in range(size)]
        new = parts.count(None)
        most = 0
        while sum(max(0, most + 1 - have) for have in counts) <= new:
            most += 1
        assert len(plan.members) == size * most
