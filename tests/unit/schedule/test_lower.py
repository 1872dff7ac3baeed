# SPDX-License-Identifier: Apache-2.0
"""Lowering fuses what can be fused, and never changes what a program computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.interpret import run, run_lowered
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice, Space, Step
from commrt.schedule.lower import Lowered, lower
from commrt.schedule.verify import check_input_lasts


def text(lowered: Lowered) -> list[str]:
    """Return the instructions in a readable form."""
    names = [space.name for space in lowered.spaces]

    def show(entries: list[tuple[int, int, int, int]]) -> str:
        return " ".join(
            f"m{a}.{b}" if kind else f"{names[a]}[{b}:{c}]" for kind, a, b, c in entries
        )

    return [
        f"{show(lowered.outputs_of(i))} = {show(lowered.inputs_of(i))}"
        for i in range(len(lowered))
    ]


def lowered_text(
    coll: str, name: str, size: int, rank: int, **params: int
) -> list[str]:
    return text(lower(algorithms.schedule(coll, name, size, 0, params), rank))


def test_direct_is_one_publish_and_one_sum() -> None:
    assert lowered_text("allreduce", "direct", 3, 1) == [
        "m2.0 m0.0 = in[0:1]",
        "out[0:1] = m0.0 in[0:1] m2.0",
    ]


def test_an_exscan_sums_in_one_pass_and_its_first_receive_takes_part() -> None:
    assert lowered_text("exscan", "direct", 4, 3) == ["out[0:1] = m0.0 m1.0 m2.0"]
    assert lowered_text("scan", "direct", 4, 2) == [
        "m3.0 = in[0:1]",
        "out[0:1] = m0.0 m1.0 in[0:1]",
    ]


def test_direct_in_two_shots_writes_the_sum_through_to_everyone() -> None:
    assert lowered_text("allreduce", "direct", 3, 1, shots=2) == [
        "m2.0 = in[2:3]",
        "m0.0 = in[0:1]",
        "out[1:2] m2.1 m0.1 = m0.0 in[1:2] m2.0",
        "out[2:3] = m2.1",
        "out[0:1] = m0.1",
    ]


def test_ring_stores_no_partial_sums() -> None:
    assert lowered_text("allreduce", "ring", 3, 0) == [
        "m1.0 = in[2:3]",
        "m1.1 = in[1:2] m2.0",
        "out[0:1] m1.2 = in[0:1] m2.1",
        "out[2:3] m1.3 = m2.2",
        "out[1:2] = m2.3",
    ]


def test_recursive_doubling_on_two_ranks_is_two_instructions() -> None:
    assert lowered_text("allreduce", "recursive_doubling", 2, 0) == [
        "m1.0 = in[0:1]",
        "out[0:1] = in[0:1] m1.0",
    ]


def test_a_fragment_counts_its_messages_and_publishes() -> None:
    lowered = lower(algorithms.schedule("allreduce", "ring", 4), 1)
    assert lowered.messages_in == {0: 6}
    assert lowered.messages_out == {2: 6}
    assert lowered.num_publishes == 6
    assert lowered.inputs.dtype == lowered.deps.dtype == np.int32


def test_superfluous_scratch_has_no_length() -> None:
    lowered = lower(algorithms.schedule("allreduce", "direct", 4), 0)
    assert lowered.spaces[2].scale == (0, 1)
    kept = lower(algorithms.schedule("allreduce", "recursive_doubling", 4), 0)
    assert kept.spaces[2].scale == (3, 1)


def test_sends_over_mpi_are_instructions_of_their_own() -> None:
    schedule = algorithms.schedule("bcast", "direct", 4)
    assert text(lower(schedule, 0, lambda peer: peer == 2)) == [
        "m1.0 = in[0:1]",
        "m2.0 out[0:1] = in[0:1]",
        "m3.0 = in[0:1]",
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_block_from_another_node_is_received_where_it_belongs(size: int) -> None:
    schedule = algorithms.schedule("alltoall", "direct", size)
    lowered = lower(schedule, 0, lambda peer: False)
    received = [line for line in text(lowered) if " = m" in line]
    assert sorted(received) == [
        f"out[{peer}:{peer + 1}] = m{peer}.0" for peer in range(1, size)
    ]
    assert lowered.spaces[2].scale == (0, 1)  # no scratch


def test_one_rank_copies_and_sends_nothing() -> None:
    for coll in ("allreduce", "reduce", "bcast", "alltoall"):
        for name in algorithms.names(coll, 1):
            lowered = lower(algorithms.schedule(coll, name, 1), 0)
            assert not lowered.messages_in
            assert text(lowered) == ["out[0:1] = in[0:1]"]


def test_the_order_that_the_author_asked_for_stays() -> None:
    lowered = lower(algorithms.schedule("alltoall", "pairwise", 3), 0)
    sends = [i for i, line in enumerate(text(lowered)) if line.startswith("m")]
    received = lowered.deps_of(sends[1])
    assert received
    assert lowered.inputs_of(received[0])[0][:2] == (1, 2)


def test_a_message_to_oneself_is_refused() -> None:
    program = RankProgram(0, (Space("in", "in", 1), Space("out", "out", 1)))
    program.steps.append(Step(Op.SEND, Slice(0, 0, 1), None, 0, ()))
    with pytest.raises(ScheduleError, match=r"rank 0 step 0 .*to itself"):
        lower(program)
    with pytest.raises(ScheduleError, match="which rank"):
        lower(algorithms.schedule("allreduce", "ring", 2))


def lower_author(author: object, coll: str = "allreduce", size: int = 2) -> list[str]:
    return text(lower(build_program(author, coll, 0, size)))  # type: ignore[arg-type]


def test_a_copy_read_before_its_source_changes_reads_the_source() -> None:
    def author(b: Builder) -> None:
        saved = b.tmp(2)
        b.copy(saved[0], b.inp[0])
        b.recv(b.out[0], 1)
        b.copy(b.out[1], saved[0])

    # In place, out[0] is in[0]: the copy must be made before the message lands.
    assert lower_author(author) == ["out[1:2] = in[0:1]", "out[0:1] = m1.0"]
    program = build_program(author, "allreduce", 0, 2)
    assert lower(program).deps_of(1) == [0]


def test_a_noted_copy_keeps_a_sum_from_growing() -> None:
    def author(b: Builder) -> None:
        partial = b.tmp(2)
        b.rred(b.out[0], 1, src=b.inp[0])
        b.copy(partial[0], b.out[0])
        b.rred(b.out[0], 1)
        b.copy(b.out[1], partial[0])

    assert lower_author(author)[0].endswith("= in[0:1] m1.0")


def test_a_sum_does_not_grow_where_a_copy_of_it_is_kept() -> None:
    def author(b: Builder) -> None:
        b.recv(b.out[0], 1)
        b.copy(b.out[1], b.out[0])
        b.reduce(b.out[0], b.inp[0])  # so that the copy is carried out
        b.rred(b.out[1], 1)

    # Not both messages into both blocks.
    assert lower_author(author) == [
        "out[0:1] out[1:2] = m1.0",
        "out[0:1] = out[0:1] in[0:1]",
        "out[1:2] = out[1:2] m1.1",
    ]


def test_a_read_sum_does_not_grow() -> None:
    def author(b: Builder) -> None:
        b.rred(b.out[0], 1, src=b.inp[0])
        b.send(b.out[0], 1)
        b.rred(b.out[0], 1)

    assert lower_author(author) == [
        "out[0:1] m1.0 = in[0:1] m1.0",
        "out[0:1] = out[0:1] m1.1",
    ]


def test_a_copy_onto_itself_is_nothing() -> None:
    def author(b: Builder) -> None:
        b.copy(b.out[:], b.inp[:])
        b.copy(b.out[1], b.out[1])

    assert lower_author(author) == ["out[0:2] = in[0:2]"]


SPACES = 4
BLOCKS = 3
Action = tuple[int, int, int, int, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 4),  # what
        st.integers(0, SPACES - 1),  # source space
        st.integers(1, SPACES - 1),  # destination space
        st.integers(0, BLOCKS - 1),  # source block
        st.integers(0, BLOCKS - 1),  # destination block
        st.integers(1, 2),  # blocks
    ),
    max_size=14,
)


def random_author(actions: list[Action], b: Builder) -> None:
    """Any local steps; an exchange sends from one place and receives into another."""
    b.blocks(BLOCKS)
    buffers = [b.inp, b.out, b.tmp(BLOCKS), b.tmp(BLOCKS)]
    b.copy(b.out[:], b.inp[:])
    for scratch in buffers[2:]:
        b.copy(scratch[:], b.inp[:])
    for what, src_space, dst_space, src_block, dst_block, num in actions:
        lo, to = min(src_block, BLOCKS - num), min(dst_block, BLOCKS - num)
        src = buffers[src_space][lo : lo + num]
        dst = buffers[dst_space][to : to + num]
        # in and out may be one: as if of one space.
        one = src_space == dst_space or {src_space, dst_space} == {0, 1}
        same = one and 0 < abs(lo - to) < num
        if what == 0 and not same:
            b.copy(dst, src)
        elif what == 1 and not same:
            b.reduce(dst, src)
        elif what >= 2 and b.rank == 0:
            b.send(src, 1)
        elif what == 2:
            b.recv(dst, 0)
        elif what >= 3:
            b.rred(dst, 0, src=None if what == 3 or same else src)


@settings(max_examples=400, deadline=None)
@given(actions=ACTIONS, fuse=st.booleans())
def test_any_program_computes_the_same_after_lowering(
    actions: list[Action], fuse: bool
) -> None:
    def make(rank: int) -> RankProgram:
        return build_program(lambda b: random_author(actions, b), "allreduce", rank, 2)

    schedule = Schedule("allreduce", "random", 2, 0, make)
    lowered = [lower(schedule, rank, lambda peer: fuse) for rank in range(2)]
    # Blocks of 2 elements: every block has the same length, so any may meet any.
    xs = [np.arange(6) + 1, 100 * np.arange(6) + 7]
    for in_place in (False, True) if input_lasts(schedule) else (False,):
        plain = run(schedule, xs, in_place=in_place)
        found = run_lowered(schedule, lowered, xs, in_place=in_place, fragments=2)
        for a, b in zip(plain, found, strict=True):
            np.testing.assert_array_equal(a, b)


def input_lasts(schedule: Schedule) -> bool:
    """Return whether the verifier would let the schedule run in place."""
    try:
        for program in schedule.programs():
            check_input_lasts(program)
    except ScheduleError:
        return False
    return True
