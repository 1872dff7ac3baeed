# SPDX-License-Identifier: Apache-2.0
"""Native tables of schedules take what is one, and refuse what is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commrt import _native, algorithms
from commrt.errors import ScheduleError
from commrt.nccl.config import GroupShape
from commrt.schedule.columns import lowered_programs
from commrt.schedule.ir import Op, RankProgram, Slice, Space, Step
from commrt.schedule.lower import lower
from commrt.schedule.rounds import lower_to_rounds, rows_of, sequence, sequence_rows
from commrt.schedule.space_tables import space_table
from commrt.schedule.verify_rounds import check_rounds


@pytest.mark.parametrize(
    "ends",
    [
        ([0, 0, 1], None),
        ((0, 0), None),
        ("abc", None),
        (None, (0, 0, "x")),
        ((0, 0, 2**40), None),
    ],
)
def test_a_step_has_slices_of_three_numbers(ends: tuple[object, object]) -> None:
    columns = _native.StepColumns()
    with pytest.raises((TypeError, ValueError)):
        columns.append(Op.SEND, ends[0], ends[1], 1, (), ())  # type: ignore[arg-type]
    assert len(columns) == 0


def test_a_step_on_a_space_that_there_is_not_is_refused() -> None:
    columns = _native.StepColumns()
    columns.place([0, 4])
    with pytest.raises(IndexError, match="space 2 of 2"):
        columns.record(Op.SEND, (2, 0, 1), None, 1)
    with pytest.raises(IndexError, match="more than any schedule has"):
        columns.record(Op.SEND, (0, 0, 2**31 - 1), None, 1)
    with pytest.raises(IndexError):
        columns.row(0)


@pytest.mark.parametrize(
    "row",
    [
        (3, 1, 0, False, 1, 1, 0, []),
        (0, -1, 0, False, 1, 1, 0, []),
        (0, 1, -1, False, 1, 1, 0, []),
        (0, 2, 0, False, 0, 0, 1, [1]),
    ],
)
def test_a_space_that_cannot_be_is_refused(row: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="a space has"):
        _native.SpaceTable([row])  # type: ignore[list-item]


def test_lowered_tables_that_contradict_each_other_are_refused() -> None:
    one = lower(algorithms.schedule("allreduce", "ring", 3), 0)
    lowered_programs([one])
    beyond = one.inputs.copy()
    beyond[one.inputs[:, 0] == 0, 3] = 1000
    for wrong in (
        replace(one, rank=1),
        replace(one, inputs=beyond),
        replace(one, deps=one.deps + np.int32(1000)),
        replace(one, input_ptr=one.input_ptr[::-1].copy()),
        replace(one, output_ptr=one.output_ptr[:-1]),
    ):
        with pytest.raises(ValueError, match="malformed"):
            lowered_programs([wrong])


def test_a_malformed_step_is_not_lowered() -> None:
    program = RankProgram(0, (Space("in", "in", 1), Space("out", "out", 1)))
    program.steps.append(Step(Op.COPY, Slice(0, 0, 2), Slice(1, 0, 2), -1, ()))
    with pytest.raises(ScheduleError, match="rank 0 step 0 is malformed"):
        lower(program)


def test_rows_of_a_stream_are_its_steps() -> None:
    shape = GroupShape(2, 1)
    for own in lower_to_rounds(algorithms.schedule("allreduce", "direct", 5)):
        rows = sequence_rows(own, 5, fragments=2, lag=1, shape=shape)
        steps = sequence(own, 5, fragments=2, lag=1, shape=shape)
        assert rows_of(steps).tolist() == rows.tolist()


def test_rows_that_name_what_there_is_not_are_refused() -> None:
    schedule = algorithms.schedule("allreduce", "ring", 3)
    rounds = lower_to_rounds(schedule)
    shape = GroupShape.of(3)
    steps = [sequence(own, 3, shape=shape) for own in rounds]
    at, (fragment, work) = next(
        (i, step) for i, step in enumerate(steps[1]) if isinstance(step, tuple)
    )
    steps[1][at] = fragment, work._replace(src=Slice(7, 0, 1))
    with pytest.raises(ScheduleError, match=r"rank 1 step .* that there is not"):
        check_rounds(schedule, rounds, steps, shape)


def test_spaces_of_unlike_blocks_have_lengths() -> None:
    counts = Space("in", "in", 2, split="counts", counts=(1, 2))
    assert isinstance(space_table((counts,)), _native.SpaceTable)
