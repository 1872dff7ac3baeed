# SPDX-License-Identifier: Apache-2.0
"""Run a schedule, or its lowered form, on numpy arrays: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt.errors import ScheduleError
from commrt.schedule.engine_model import LINES, EngineModel
from commrt.schedule.execute import Execution
from commrt.schedule.ir import Op, Schedule, Slice, Space
from commrt.schedule.lower import LOCAL, Lowered
from commrt.vocabulary.operations import operation

__all__ = ["run", "run_lowered"]

Array = npt.NDArray[Any]
Reduction = Callable[[Array, Array], Array]
GARBAGE = 0xA5
"""Byte that fills what nobody has written."""


def run(
    schedule: Schedule,
    inputs: Sequence[Array | None],
    redop: Reduction = np.add,
    *,
    in_place: bool = False,
) -> list[Array | None]:
    """Run ``schedule`` step by step and return each rank's output.

    Args:
        schedule: what to run.
        inputs: each rank's array; None where the operation takes none.
        redop: the reduction.
        in_place: whether ``in`` and ``out`` are one buffer where they may be.
    """
    programs = schedule.programs()
    memory = _Memory(
        schedule, [program.spaces for program in programs], inputs, in_place=in_place
    )
    steps = [list(program.steps) for program in programs]
    for (rank, index), sender in Execution(programs):
        step = steps[rank][index]
        assert step.dst is not None
        source = step.src if sender is None else steps[sender[0]][sender[1]].src
        assert source is not None
        moved = memory.read(rank if sender is None else sender[0], source)
        if step.op in (Op.RRED, Op.RED):
            own = step.src if step.op is Op.RRED else step.dst
            assert own is not None
            operands = [memory.read(rank, own), moved]
            if step.op is Op.RRED and step.peer < rank:
                operands.reverse()
            moved = redop(*operands)
        memory.write(rank, step.dst, moved)
    return memory.outputs()


def run_lowered(
    schedule: Schedule,
    lowered: Sequence[Lowered],
    inputs: Sequence[Array | None],
    redop: Reduction = np.add,
    *,
    in_place: bool = False,
    fragments: int = 1,
    align: int = 1,
    lines: int = LINES,
) -> list[Array | None]:
    """Run the lowered programs of all ranks as the engine does; return the outputs.

    Args:
        schedule: where ``lowered`` comes from.
        lowered: each rank's lowered program.
        inputs: each rank's array; None where the operation takes none.
        redop: the reduction.
        in_place: whether ``in`` and ``out`` are one buffer where they may be.
        fragments: parts that every block is cut into.
        align: elements that fragments are rounded down to.
        lines: message lines per ordered pair of ranks.
    """
    memory = _Memory(
        schedule, [one.spaces for one in lowered], inputs, in_place=in_place
    )
    messages: dict[tuple[int, int, int, int], Array] = {}
    for rank, fragment, index in EngineModel(lowered, fragments, lines):
        cut = (fragment, fragments, align)
        value: Array | None = None
        for kind, a, b, c in lowered[rank].inputs_of(index):
            if kind == LOCAL:
                operand = memory.read(rank, Slice(a, b, c), cut)
            else:
                operand = messages.pop((fragment, a, rank, b))
            value = operand if value is None else redop(value, operand)
        assert value is not None
        for kind, a, b, c in lowered[rank].outputs_of(index):
            if kind == LOCAL:
                memory.write(rank, Slice(a, b, c), value, cut)
            else:
                messages[fragment, rank, a, b] = value
    return memory.outputs()


Cut = tuple[int, int, int]
"""fragment, fragments, align."""
WHOLE: Cut = (0, 1, 1)


class _Memory:
    """The arrays of all ranks' spaces."""

    def __init__(
        self,
        schedule: Schedule,
        spaces: Sequence[Sequence[Space]],
        inputs: Sequence[Array | None],
        *,
        in_place: bool,
    ) -> None:
        if len(inputs) != schedule.size:
            raise ScheduleError(
                f"{len(inputs)} inputs for {schedule.size} ranks; expected one for "
                f"each, None where a rank has none"
            )
        given = next((x for x in inputs if x is not None), np.zeros(0))
        full = _full_length(schedule, inputs)
        self._bounds = [[space.bounds(full) for space in own] for own in spaces]
        self._arrays: list[list[Array]] = []
        for rank, own in enumerate(spaces):
            arrays: list[Array] = []
            for number, space in enumerate(own):
                shared = in_place and space.alias and space.nblk == own[0].nblk
                length = self._bounds[rank][number][-1]
                if shared:
                    arrays.append(arrays[0])
                elif number == 0 and length:
                    arrays.append(_input(inputs[rank], rank, length))
                else:
                    arrays.append(_garbage(length, given.dtype))
            self._arrays.append(arrays)
        output_on = operation(schedule.coll).output_on
        self._has_output = [output_on != "none" and own[1].nblk > 0 for own in spaces]

    def read(self, rank: int, where: Slice, cut: Cut = WHOLE) -> Array:
        """Return a copy of one fragment of each block of ``where``, joined."""
        array = self._arrays[rank][where.space]
        parts = [array[lo:hi] for lo, hi in self._ranges(rank, where, cut)]
        joined: Array = np.concatenate(parts)
        return joined

    def write(self, rank: int, where: Slice, value: Array, cut: Cut = WHOLE) -> None:
        """Store ``value`` into one fragment of each block of ``where``."""
        array = self._arrays[rank][where.space]
        done = 0
        for lo, hi in self._ranges(rank, where, cut):
            array[lo:hi] = value[done : done + hi - lo]
            done += hi - lo
        if done != len(value):
            raise ScheduleError(
                f"rank {rank}: a step puts {len(value)} elements into {done}; both "
                f"sides must have the same length"
            )

    def _ranges(self, rank: int, where: Slice, cut: Cut) -> list[tuple[int, int]]:
        bounds = self._bounds[rank][where.space]
        return [
            _fragment(bounds[block], bounds[block + 1], cut)
            for block in range(where.lo, where.hi)
        ]

    def outputs(self) -> list[Array | None]:
        """Return each rank's output."""
        return [
            arrays[1] if has else None
            for arrays, has in zip(self._arrays, self._has_output, strict=True)
        ]


def _fragment(lo: int, hi: int, cut: Cut) -> tuple[int, int]:
    fragment, fragments, align = cut

    def edge(number: int) -> int:
        if number == fragments:
            return hi
        return lo + (hi - lo) * number // fragments // align * align

    return edge(fragment), edge(fragment + 1)


def _full_length(schedule: Schedule, inputs: Sequence[Array | None]) -> int:
    spec = operation(schedule.coll)
    if spec.x_count == "none":
        return 0
    x = inputs[schedule.root]
    if x is None:
        raise ScheduleError(
            f"rank {schedule.root}, the root, has no input: pass an array for it"
        )
    return x.size * (schedule.size if spec.out_count == "times_size" else 1)


def _input(x: Array | None, rank: int, length: int) -> Array:
    if x is None or x.size != length:
        found = "no input" if x is None else f"{x.size} elements"
        raise ScheduleError(f"rank {rank} has {found}, expected {length} elements")
    own: Array = x.reshape(-1).copy()
    return own


def _garbage(length: int, dtype: np.dtype[Any]) -> Array:
    raw = np.full(length * dtype.itemsize, GARBAGE, np.uint8)
    filled: Array = raw.view(dtype)
    return filled
