# SPDX-License-Identifier: Apache-2.0
"""The verifier catches every kind of mistake, and says where it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.ir import Op, RankProgram, RedopClass, Schedule, Slice, Space, Step
from commrt.schedule.verify import verify

Author = Callable[[Builder], None]


def schedule_of(
    author: Author, coll: str = "allreduce", size: int = 2, *, ordered: bool = False
) -> Schedule:
    def make(rank: int) -> RankProgram:
        return build_program(author, coll, rank, size)

    redop_class: RedopClass = "ordered" if ordered else "commutative"
    return Schedule(coll, "mutant", size, 0, make, {}, redop_class)


def mutated(change: Callable[[int, int, Step], Step], coll: str, name: str) -> Schedule:
    """Return a built-in schedule on 4 ranks, each step passed through ``change``."""
    original = algorithms.schedule(coll, name, 4)

    def make(rank: int) -> RankProgram:
        old = original.program(rank)
        new = RankProgram(rank, old.spaces)
        for index, step in enumerate(old.steps):
            new.steps.append(change(rank, index, step))
        return new

    return Schedule(coll, "mutant", 4, 0, make)


def right(b: Builder) -> None:
    b.blocks(1)
    got = b.tmp(1)
    b.send(b.inp[0], b.rank + 1)
    b.rred(got[0], b.rank + 1, src=b.inp[0])
    b.copy(b.out[0], got[0])


def test_a_right_schedule_passes_with_its_costs() -> None:
    report = verify(schedule_of(right))
    assert report.num_steps == 6
    assert report.critical_path == 1
    assert report.sent == report.scratch == report.max_messages == 1


def double_reduction(b: Builder) -> None:
    b.blocks(1)
    got = b.tmp(2)
    b.copy(got[0], b.inp[0])
    b.send(b.inp[0], b.rank + 1)
    b.rred(got[1], b.rank + 1, src=b.inp[0])
    b.reduce(got[1], got[0])
    b.copy(b.out[0], got[1])


def unmatched(b: Builder) -> None:
    right(b)
    if b.rank == 0:
        b.send(b.out[0], 1)


def in_place_exchange(b: Builder) -> None:
    b.blocks(1)
    b.copy(b.out[0], b.inp[0])
    b.send(b.out[0], b.rank + 1)
    b.rred(b.out[0], b.rank + 1)


def receive_first(b: Builder) -> None:
    b.blocks(1)
    b.copy(b.out[0], b.inp[0])
    got = b.tmp(1)
    first = b.recv(got[0], b.rank + 1)
    b.after(first)
    b.send(b.inp[0], b.rank + 1)
    b.reduce(b.out[0], got[0])


def reads_nothing(b: Builder) -> None:
    b.copy(b.out[0], b.tmp(2)[0])


def forgets_a_block(b: Builder) -> None:
    got = b.tmp(2)
    b.send(b.inp[:], b.rank + 1)
    b.recv(got[:], b.rank + 1)
    b.copy(b.out[0], b.inp[0])
    b.reduce(b.out[0], got[0])


def mixes_blocks(b: Builder) -> None:
    b.copy(b.out[0], b.inp[0])
    b.reduce(b.out[0], b.inp[1])


def other_lengths(b: Builder) -> None:
    if b.rank == 0:
        b.send(b.inp[0], 1)
    else:
        b.rred(b.out[1], 0, src=b.inp[1])


def input_read_after_output_written(b: Builder) -> None:
    b.blocks(1)
    got, twice = b.tmp(1), b.tmp(1)
    b.send(b.inp[0], b.rank + 1)
    b.recv(got[0], b.rank + 1)
    b.copy(b.out[0], got[0])
    b.copy(twice[0], b.inp[0])
    b.reduce(b.out[0], twice[0])


@pytest.mark.parametrize(
    ("author", "message"),
    [
        (double_reduction, r"rank [01] step 3 \(red tmp0\[1\].*second time"),
        (unmatched, r"rank 0 sends 2 messages to rank 1.*step 3 .*no partner"),
        (
            in_place_exchange,
            r"deadlock.*rank [01] step 2 \(rred out\[0\] from [01]\), w",
        ),
        (receive_first, r"deadlock.*rank [01] step 1 \(recv tmp0\[0\] from [01]\), wh"),
        (reads_nothing, r"step 0 \(copy .*reads block 0, which holds nothing"),
        (
            forgets_a_block,
            r"block out\[1\] ends with .*expected part 1 from ranks 0, 1",
        ),
        (other_lengths, r"rank 0 step 0 .*out\[1\] of rank 1 has another length"),
        (
            input_read_after_output_written,
            r"step 3 \(copy tmp1.*it reads in\[0\], but out\[0\] was",
        ),
    ],
)
def test_mistakes_are_caught(author: Author, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(schedule_of(author))


def test_reducing_different_blocks_is_caught() -> None:
    with pytest.raises(ScheduleError, match="part 0 from rank 0 with part 1 from rank"):
        verify(schedule_of(mixes_blocks, "reduce_scatter"))


def test_blocks_of_equal_place_in_other_splits_match_only_where_lengths_do() -> None:
    def shifted(b: Builder) -> None:
        b.blocks(4)
        if b.rank == 0:
            b.send(b.inp[0:2], 1)
        else:
            b.recv(b.out[1:3], 0)

    with pytest.raises(ScheduleError, match="another length"):
        verify(schedule_of(shifted, "bcast"))


def test_a_missing_dependency_is_a_race() -> None:
    def drop(rank: int, index: int, step: Step) -> Step:
        return step._replace(deps=()) if (rank, index) == (2, 4) else step

    with pytest.raises(ScheduleError, match=r"race: rank 2 step 4 .*and rank 2 step"):
        verify(mutated(drop, "allreduce", "ring"))


def test_an_indirect_dependency_is_no_race() -> None:
    def thin(rank: int, index: int, step: Step) -> Step:
        return step._replace(deps=(index - 1,)) if index else step

    verify(mutated(thin, "gather", "binomial"))


def test_a_wrong_peer_is_caught() -> None:
    def stray(rank: int, index: int, step: Step) -> Step:
        if rank == 1 and index == 1:
            return step._replace(peer=3)
        return step

    with pytest.raises(ScheduleError, match=r"rank 1 .*rank [23]"):
        verify(mutated(stray, "allreduce", "ring"))


def test_a_wrong_block_is_caught() -> None:
    def stray(rank: int, index: int, step: Step) -> Step:
        if rank == 1 and step.op is Op.RECV:
            return step._replace(dst=Slice(1, 0, 1))
        return step

    with pytest.raises(ScheduleError):
        verify(mutated(stray, "allgather", "ring"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deps": (9,)}, "not all earlier"),
        ({"peer": 0}, "peer 0 is not another rank"),
        ({"peer": 7}, "peer 7 is not another rank"),
        ({"src": Slice(0, 0, 9)}, r"in\[0:9\] is not within its 1 blocks"),
        ({"src": Slice(5, 0, 1)}, r"space5\[0:1\] is not within its 0 blocks"),
        ({"src": None}, "src, dst, peer given"),
    ],
)
def test_malformed_steps_are_refused(change: dict[str, object], message: str) -> None:
    def make(rank: int) -> RankProgram:
        program = RankProgram(rank, (Space("in", "in", 1), Space("out", "out", 1)))
        step = Step(Op.SEND, Slice(0, 0, 1), None, 1 - rank, ())
        program.steps.append(step._replace(**change) if rank == 0 else step)
        return program

    with pytest.raises(ScheduleError, match=rf"rank 0 step 0 \(send\): .*{message}"):
        verify(Schedule("allreduce", "mutant", 2, 0, make))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(Op.COPY, Slice(1, 0, 1), Slice(0, 0, 1), -1, ()), "caller's input"),
        (Step(Op.COPY, Slice(1, 0, 2), Slice(1, 1, 3), -1, ()), "overlap"),
        (Step(Op.COPY, Slice(0, 0, 2), Slice(1, 0, 1), -1, ()), "2 blocks into 1"),
    ],
)
def test_malformed_copies_are_refused(step: Step, message: str) -> None:
    def make(rank: int) -> RankProgram:
        program = RankProgram(rank, (Space("in", "in", 4), Space("out", "out", 4)))
        program.steps.append(step)
        return program

    with pytest.raises(ScheduleError, match=message):
        verify(Schedule("allreduce", "mutant", 1, 0, make))


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        ((Space("out", "out", 1), Space("in", "in", 1)), "expected in, out"),
        ((Space("in", "in", 1), Space("out", "out", 2)), "different lengths"),
        (
            (
                Space("in", "in", 1),
                Space("out", "out", 1),
                Space("tmp0", "tmp", 1, (1, 3)),
            ),
            "whole number",
        ),
    ],
)
def test_malformed_spaces_are_refused(spaces: tuple[Space, ...], message: str) -> None:
    schedule = Schedule("allreduce", "mutant", 1, 0, lambda r: RankProgram(r, spaces))
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


def test_a_message_names_the_schedule() -> None:
    with pytest.raises(ScheduleError, match="bcast mutant on 3 ranks, root 0: "):
        verify(schedule_of(reads_nothing, "bcast", 3))


def test_rank_order_is_checked_where_it_is_promised() -> None:
    def ascending(b: Builder) -> None:
        b.blocks(1)
        if b.rank:
            b.send(b.inp[0], 0)
            return
        b.copy(b.out[0], b.inp[0])
        for peer in range(1, b.size):
            b.rred(b.out[0], peer)

    def descending(b: Builder) -> None:
        b.blocks(1)
        if b.rank:
            b.send(b.inp[0], 0)
            return
        b.copy(b.out[0], b.inp[0])
        for peer in range(b.size - 1, 0, -1):
            b.rred(b.out[0], peer)

    verify(schedule_of(ascending, "reduce", 4, ordered=True))
    verify(schedule_of(descending, "reduce", 4))
    with pytest.raises(ScheduleError, match="out of rank order"):
        verify(schedule_of(descending, "reduce", 4, ordered=True))


def test_recursive_doubling_combines_in_rank_order() -> None:
    author = algorithms.get("allreduce", "recursive_doubling").author
    verify(schedule_of(author, "allreduce", 8, ordered=True))


def test_a_data_operation_may_not_reduce() -> None:
    def author(b: Builder) -> None:
        b.copy(b.out[0], b.inp[0])
        b.rred(b.out[1], b.rank + 1, src=b.out[0])

    def make(rank: int) -> RankProgram:
        return build_program(author, "allgather", rank, 2)

    with pytest.raises(ScheduleError):
        verify(Schedule("allgather", "mutant", 2, 0, make, {}, "none"))


def test_a_barrier_needs_every_rank() -> None:
    def neighbours(b: Builder) -> None:
        b.send(b.inp[0], b.rank + 1)
        b.rred(b.out[0], b.rank - 1, src=b.inp[0])

    verify(schedule_of(neighbours, "barrier", 2))
    with pytest.raises(ScheduleError, match="expected part 0 from ranks 0, 1, 2"):
        verify(schedule_of(neighbours, "barrier", 3))
