# SPDX-License-Identifier: Apache-2.0
"""Hundreds of ranks are verified, too, and a single mistake among them is found."""

from __future__ import annotations

import pytest

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.schedule.ir import Op, RankProgram, Schedule, Step
from commrt.schedule.verify import verify
from commrt.schedule.verify_lowered import verify_lowered
from commrt.schedule.verify_rounds import verify_rounds

RANKS = 128


def changed(coll: str, name: str, rank: int, index: int, step: Step) -> Schedule:
    """Return a built-in schedule with one step of one rank replaced."""
    original = algorithms.schedule(coll, name, RANKS)

    def make(at: int) -> RankProgram:
        program = original.program(at)
        if at != rank:
            return program
        made = RankProgram(at, program.spaces)
        for number, each in enumerate(program.steps):
            made.steps.append(step if number == index else each)
        return made

    return Schedule(coll, "mutant", RANKS, 0, make)


def last(coll: str, name: str, rank: int, op: Op) -> tuple[int, Step]:
    """Return the last step of a kind in the program of a rank."""
    program = algorithms.schedule(coll, name, RANKS).program(rank)
    return max(
        (index, step) for index, step in enumerate(program.steps) if step.op is op
    )


@pytest.mark.parametrize(
    ("coll", "name", "longest"),
    [
        ("allreduce", "ring", 2 * (RANKS - 1)),
        ("allreduce", "halving_doubling", 14),
        ("allreduce", "swing", 14),
        ("alltoall", "dissemination", 7),
        ("scan", "recursive_doubling", 7),
    ],
)
def test_right_ones_pass(coll: str, name: str, longest: int) -> None:
    schedule = algorithms.schedule(coll, name, RANKS)
    assert verify(schedule).critical_path == longest
    verify_lowered(schedule)
    assert verify_rounds(schedule).num_rounds == longest


def test_a_contribution_that_is_lost_is_named() -> None:
    index, step = last("allreduce", "halving_doubling", 77, Op.RRED)
    lost = changed(
        "allreduce",
        "halving_doubling",
        77,
        index,
        step._replace(op=Op.RECV, src=None),
    )
    with pytest.raises(ScheduleError, match=r"ends with part \d+ from ranks .*, …, ex"):
        verify(lost)
    with pytest.raises(ScheduleError, match=r"lowered: rank .*ends with part"):
        verify_lowered(lost)
    with pytest.raises(ScheduleError, match=r"rounds: rank .*ends with part"):
        verify_rounds(lost)


def test_a_race_of_one_rank_is_found() -> None:
    index, step = last("allreduce", "ring", 101, Op.SEND)
    racing = changed("allreduce", "ring", 101, index, step._replace(deps=()))
    with pytest.raises(ScheduleError, match=f"race: rank 101 step {index} "):
        verify(racing)


def test_a_deadlock_of_all_ranks_is_followed_round_the_ring() -> None:
    original = algorithms.schedule("allgather", "ring", RANKS)

    def receive_first(rank: int) -> RankProgram:
        program = original.program(rank)
        steps = list(program.steps)
        made = RankProgram(rank, program.spaces)
        # The first send waits for the first receive: nobody begins.
        order = [steps[0], steps[2]._replace(deps=()), steps[1]._replace(deps=(0, 1))]
        for each in (*order, *steps[3:]):
            made.steps.append(each)
        return made

    stuck = Schedule("allgather", "mutant", RANKS, 0, receive_first)
    with pytest.raises(ScheduleError, match="deadlock when sends wait") as raised:
        verify(stuck)
    assert str(raised.value).count("which waits for") >= RANKS


def test_a_message_to_the_wrong_rank_is_named() -> None:
    index, step = last("alltoall", "direct", 9, Op.SEND)
    other = (step.peer + 2) % RANKS
    stray = changed("alltoall", "direct", 9, index, step._replace(peer=other))
    with pytest.raises(ScheduleError, match=r"rank 9 sends .* every send needs one"):
        verify(stray)
