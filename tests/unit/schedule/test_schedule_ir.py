# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: blocks, serial form, and what the builder refuses."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice, Space, Step, StepTable
from commrt.vocabulary.operations import SCHEDULED

EVERY = [(coll, name) for coll in SCHEDULED for name in algorithms.names(coll, 8)]


@given(nblk=st.integers(1, 40), num_elements=st.integers(0, 1000))
def test_even_blocks_tile_any_length(nblk: int, num_elements: int) -> None:
    bounds = Space("in", "in", nblk).bounds(num_elements)
    lengths = [hi - lo for lo, hi in pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, num_elements)
    assert max(lengths) - min(lengths) <= 1


@given(size=st.integers(1, 9), share=st.integers(1, 5), count=st.integers(0, 50))
def test_a_rank_share_has_the_blocks_of_the_full_vector(
    size: int, share: int, count: int
) -> None:
    full = Space("out", "out", size * share).bounds(size * count)
    part = Space("in", "in", share, (1, size)).bounds(size * count)
    for rank in range(size):
        own = full[rank * share : (rank + 1) * share + 1]
        assert [edge - own[0] for edge in own] == part


def test_counts_and_dyn_spaces_have_their_own_boundaries() -> None:
    counts = Space("out", "out", 3, split="counts", counts=(2, 0, 5))
    assert counts.bounds(7) == [0, 2, 2, 7]
    assert Space("tmp0", "tmp", 2, split="dyn", cap=(4, 4)).bounds(1) == [0, 4, 8]
    boxes = Space("in", "in", 1, split="boxes", boxes=(((0, 2), (1, 3)),))
    with pytest.raises(ScheduleError, match="not contiguous"):
        boxes.bounds(9)


@pytest.mark.parametrize(
    "fields",
    [
        {"split": "counts"},
        {"counts": (1, 2)},
        {"split": "dyn", "cap": (1,)},
        {"scale": (1, 0)},
    ],
)
def test_inconsistent_spaces_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ScheduleError, match="space 'in'"):
        Space("in", "in", 2, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("coll", "name"), EVERY)
def test_json_round_trip_keeps_everything(coll: str, name: str) -> None:
    original = algorithms.schedule(coll, name, 6, root=0)
    text = original.to_json()
    copy = Schedule.from_json(text)
    assert copy.to_json() == text
    assert copy.digest() == original.digest()
    assert copy.programs() == original.programs()
    program = original.program(5)
    assert RankProgram.from_json(program.to_json()) == program
    assert RankProgram.from_json(program.to_json()).digest() == program.digest()


def test_irregular_spaces_survive_json() -> None:
    spaces = (
        Space("in", "in", 2, split="counts", counts=(3, 4)),
        Space("out", "out", 1, split="boxes", boxes=(((0, 2), (1, 3)),)),
        Space("tmp0", "tmp", 2, split="dyn", cap=(8, 9)),
    )
    program = RankProgram(0, spaces)
    assert RankProgram.from_json(program.to_json()) == program


def test_schedules_differ_by_rank_count_root_and_params() -> None:
    digests = {
        algorithms.schedule("bcast", "binomial", size, root).digest()
        for size, root in ((4, 0), (4, 1), (5, 0))
    }
    direct = [
        algorithms.schedule("allreduce", "direct", 4, params={"shots": shots}).digest()
        for shots in (1, 2)
    ]
    assert len(digests) == 3
    assert direct[0] != direct[1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1}'])
def test_what_is_not_a_schedule_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Schedule.from_json(text)


def test_unknown_fields_are_refused() -> None:
    data = json.loads(algorithms.schedule("barrier", "direct", 2).to_json())
    data["surprise"] = 1
    with pytest.raises(ScheduleError, match="surprise"):
        Schedule.from_json(json.dumps(data))


def test_step_table_is_a_sequence_of_steps() -> None:
    table = StepTable()
    first = Step(Op.COPY, Slice(0, 0, 1), Slice(1, 0, 1), -1, ())
    second = Step(Op.SEND, Slice(1, 0, 1), None, 3, (0,), (0,))
    assert [table.append(first), table.append(second)] == [0, 1]
    assert list(table) == [first, second]
    assert table[-1] == second
    assert table[:1] == [first]
    with pytest.raises(IndexError):
        table[2]


def steps_of(author: object, coll: str = "allreduce", size: int = 4) -> list[Step]:
    return list(build_program(author, coll, 1, size).steps)  # type: ignore[arg-type]


def test_dependencies_follow_the_data() -> None:
    def author(b: Builder) -> None:
        b.copy(b.out[:], b.inp[:])  # 0
        b.send(b.out[0], 2)  # 1 reads what 0 wrote
        b.recv(b.out[0], 2)  # 2 overwrites what 1 reads
        b.recv(b.out[1], 3)  # 3 overwrites what 0 wrote
        b.send(b.out[0:2], 3)  # 4 reads what 2 and 3 wrote

    deps = [step.deps for step in steps_of(author)]
    assert deps == [(), (0,), (0, 1), (0,), (2, 3)]


def test_in_place_input_and_output_are_one() -> None:
    def author(b: Builder) -> None:
        b.send(b.inp[2], 0)
        b.recv(b.out[2], 0)

    assert steps_of(author)[1].deps == (0,)

    def never_in_place(b: Builder) -> None:
        b.send(b.inp[0], 0)
        b.recv(b.out[0], 0)

    assert steps_of(never_in_place, "allgather")[1].deps == ()


def test_after_adds_an_edge() -> None:
    def author(b: Builder) -> None:
        first = b.recv(b.out[0], 2)
        b.after(first)
        b.send(b.inp[1], 3)

    step = steps_of(author)[1]
    assert step.deps == step.after == (0,)


def test_peers_and_blocks_wrap_around() -> None:
    def author(b: Builder) -> None:
        b.send(b.inp[b.rank + b.size], b.rank - 2)

    assert steps_of(author)[0][1:4] == (Slice(0, 1, 2), None, 3)


def test_a_group_has_ranks_of_its_own() -> None:
    def author(b: Builder) -> None:
        group = b.sub([3, 1])
        assert (group.rank, group.size) == (1, 2)
        group.send(b.inp[0], 0)

    assert steps_of(author)[0].peer == 3


def test_groups_of_blocks() -> None:
    def author(b: Builder) -> None:
        b.blocks(6)
        halves = b.inp.grouped(2)
        assert halves[1] == Slice(0, 3, 6)
        assert halves.part(1)[0] == Slice(0, 3, 4)
        assert len(halves.part(1)) == 3

    steps_of(author)


def _self_message(b: Builder) -> None:
    b.send(b.inp[0], b.rank)


def _late_blocks(b: Builder) -> None:
    b.copy(b.out[:], b.inp[:])
    b.blocks(2)


def _uneven_scratch(b: Builder) -> None:
    b.tmp(3)


def _outside(b: Builder) -> None:
    b.inp[2:9]


def _different_lengths(b: Builder) -> None:
    b.copy(b.out[0:2], b.inp[0])


def _stranger(b: Builder) -> None:
    b.sub([0, 2])


def _no_groups(b: Builder) -> None:
    b.inp.grouped(3)


def _receive(b: Builder) -> None:
    b.recv(b.out[0], 0)


def _future(b: Builder) -> None:
    b.after(0)


@pytest.mark.parametrize(
    ("author", "message"),
    [
        (_self_message, "rank 1 step 0: a message to itself"),
        (_late_blocks, "before the first step"),
        (_uneven_scratch, r"b.tmp\(b.nblk\)"),
        (_outside, r"in\[2:9\] is not a range"),
        (_different_lengths, "2 blocks|1 blocks into 2"),
        (_stranger, "not in group"),
        (_no_groups, "do not make 3 equal groups"),
        (_future, "there are 0 steps"),
    ],
)
def test_the_builder_refuses(author: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        steps_of(author)


def test_the_builder_says_which_buffer_a_rank_lacks() -> None:
    with pytest.raises(ScheduleError, match="no 'out' buffer"):
        steps_of(_receive, "reduce")


def test_blocks_of_a_blocked_operation_are_a_multiple_of_the_ranks() -> None:
    with pytest.raises(ScheduleError, match="multiple of 4"):
        steps_of(lambda b: b.blocks(6), "allgather")
