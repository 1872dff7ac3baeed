# SPDX-License-Identifier: Apache-2.0
"""Schedules of all ranks in the form that the native checks read."""

from __future__ import annotations

from collections.abc import Sequence

from commrt import _native
from commrt.schedule.goals import Goal
from commrt.schedule.ir import RankProgram, RedopClass, Schedule
from commrt.schedule.lower import Lowered
from commrt.schedule.space_tables import space_table
from commrt.vocabulary.operations import operation

__all__ = ["RULES", "lowered_programs", "operation_goal", "step_programs"]

RULES: dict[RedopClass, int] = {"commutative": 0, "ordered": 1, "none": 2}
"""Codes of what a reduction asks for (CombineRule in schedules/contents.hpp)."""
_WHOLE, _OWN_BLOCK, _PER_RANK, _PER_PAIR = range(4)


def step_programs(
    programs: Sequence[RankProgram], multiple: int = 1
) -> _native.StepPrograms:
    """Return the programs of all ranks; ``multiple`` as ``full_multiple`` has it."""
    return _native.StepPrograms(
        [(one.steps.columns, space_table(one.spaces, multiple)) for one in programs]
    )


def lowered_programs(
    lowered: Sequence[Lowered], multiple: int = 1
) -> _native.LoweredPrograms:
    """Return the lowered programs of all ranks."""
    found = _native.LoweredPrograms()
    for one in lowered:
        spaces = space_table(one.spaces, multiple)
        tables = (one.inputs, one.input_ptr, one.outputs, one.output_ptr)
        deps, counts = (one.deps, one.dep_ptr), (one.messages_in, one.messages_out)
        found.add(one.rank, spaces, *tables, *deps, *counts)
    return found


def operation_goal(schedule: Schedule) -> _native.OperationGoal:
    """Return what the operation starts from and must end with."""
    spec, size = operation(schedule.coll), schedule.size
    goal = Goal(schedule.coll, size, schedule.root)
    shape = _WHOLE
    if spec.by_pair:
        shape = _PER_PAIR
    elif spec.out_count == "times_size":
        shape = _PER_RANK
    elif spec.out_count == "div_size":
        shape = _OWN_BLOCK
    return _native.OperationGoal(
        size=size,
        shape=shape,
        per_rank_input=spec.out_count == "times_size" or spec.by_pair,
        idempotent=goal.idempotent,
        holders=[(own.start, own.stop) for own in map(goal.holders, range(size))],
    )
