# SPDX-License-Identifier: Apache-2.0
"""Programs of boxes that the engine compiles for new shapes: the definition's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from halo_cases import draw
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import draw_layout, draw_lengths, draw_shape

from commrt.boxes.host_plans import Place, box_template, most_message_nbytes
from commrt.boxes.layouts import Block, Cyclic, Layout
from commrt.boxes.redistribution import (
    redistribution_moves,
    redistribution_template,
)
from commrt.grids.geometry import Grid
from commrt.grids.halo import HaloShape, halo_moves
from commrt.schedule.boxes import Box, BoxProgram, Move, compile_moves
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name

SEEDS = st.integers(0, 10**9)


def ranks(rank: int, size: int) -> Any:
    """Return what a plan of boxes asks of a group."""
    return SimpleNamespace(
        rank=rank, size=size, facts=SimpleNamespace(link_class="near")
    )


def plain(program: BoxProgram, strides: Sequence[Sequence[int]]) -> list[Any]:
    """Return a program of the definition as the engine tells of its own."""
    boxes = []
    for box in program.boxes:
        axes = box.axes or [(axis, 1) for axis in range(len(box.start))]
        own = [strides[box.array][axis] * step for axis, step in axes]
        offset = sum(a * b for a, b in zip(box.start, own, strict=True))
        boxes.append((box.array, offset, list(box.shape), own))
    deps = [program.deps[a:b].tolist() for a, b in pairwise(program.dep_ptr.tolist())]
    return [
        *(boxes, program.steps.tolist(), deps, list(program.peers)),
        *(program.longest_nbytes, program.ahead, program.fewest_slots),
    ]


def same_program(
    group: Any,
    template: Any,
    numbers: Sequence[int],
    moves: Sequence[Move],
    arrays: Sequence[tuple[str, tuple[int, ...]]],
    *,
    reduces: bool = False,
    stated: bool = False,
) -> None:
    """Compare the engine's program with the definition; ``arrays``: types, strides."""
    sizes = [dtype_by_name(name).itemsize for name, _ in arrays]
    wanted = compile_moves(
        moves,
        sizes,
        rank=group.rank,
        size=group.size,
        reduces=reduces,
        stated=stated,
        limit=most_message_nbytes(group.size),
    )
    strides = [own for _, own in arrays]
    found = template.program(numbers, [step for own in strides for step in own])
    assert list(found) == plain(wanted, strides)


def c_strides(shape: Sequence[int], name: str) -> tuple[int, ...]:
    return np.lib.stride_tricks.as_strided(np.empty(1, name), tuple(shape)).strides


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.booleans())
def test_halos_of_all_shapes_have_the_program_of_the_definition(
    seed: int, is_long: bool
) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 3, 4, 6, 8))
    case = draw(rng, size)
    grid = Grid(case.dims, case.periodic)
    in_order = rng.random() < 0.3
    shape = HaloShape(case.widths, case.axes, case.corners, case.direct, in_order)
    reduces, rank = case.op is not None, rng.randrange(size)
    ndim, group = case.ndim, ranks(rank, size)
    places: list[Any] = [
        tuple(Place(ndim * array + axis) for axis in range(ndim))
        for array in range(len(case.dtypes))
    ]
    template = box_template(
        group,
        halo_moves(grid, rank, shape, places, reverse=reduces),
        [(dtype_by_name(name), ndim) for name in case.dtypes],
        coll=70,
        label="boxes/direct",
        reduction=ReduceOp.SUM if reduces else None,
    )
    least = case.extents(grid.coords_of(rank))
    for _ in range(3):
        more = 400 if is_long and ndim < 4 else 3
        extents = tuple(n + rng.randint(0, more) for n in least)
        arrays = [(name, c_strides(extents, name)) for name in case.dtypes]
        shapes = [extents] * len(arrays)
        moves = halo_moves(grid, rank, shape, shapes, reverse=reduces)
        numbers = [n for each in shapes for n in each]
        same_program(group, template, numbers, moves, arrays, reduces=reduces)


@settings(deadline=None, max_examples=60)
@given(SEEDS)
def test_redistributions_have_the_program_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 8)
    shape = draw_shape(rng)
    source, target = (draw_layout(rng, shape, size) for _ in range(2))
    rank, ndim = rng.randrange(size), len(shape)
    group: Any = ranks(rank, size)
    double = dtype_by_name("float64")
    template = redistribution_template(group, (source, target), double)
    for turn in range(4):
        if turn:
            shape = tuple(rng.randint(0, 40 if ndim < 4 else 9) for _ in shape)
            source, target = (
                draw_lengths(rng, layout, shape) for layout in (source, target)
            )
        moves = redistribution_moves(source, target, rank)
        parts = [layout.local_shape(rank) for layout in (source, target)]
        arrays = [("float64", c_strides(part, "float64")) for part in parts]
        numbers = [*source.numbers, *target.numbers]
        same_program(group, template, numbers, moves, arrays)


LARGEST = 2**63 - 1
HUGE: list[tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]] = [
    ((40,), (Block(0),), (Cyclic(0, LARGEST),)),
    ((40,), (Cyclic(0, 1 << 62),), (Cyclic(0, 3 << 61),)),
    ((40,), (Cyclic(0, 2),), (Cyclic(0, LARGEST),)),
    ((LARGEST, 0), (Block(0), None), (Cyclic(0, LARGEST), None)),
    ((LARGEST, 0), (Cyclic(0, 1 << 60), None), (Cyclic(0, 3 << 58), None)),
    ((LARGEST, 0), (Block(0, (0, 1, LARGEST - 1)), None), (Cyclic(0, 5), None)),
    ((0, LARGEST), (None, Cyclic(0, LARGEST)), (None, Block(0))),
]


@pytest.mark.parametrize(("shape", "source", "target"), HUGE)
def test_numbers_as_large_as_there_are_have_the_program_of_the_definition(
    shape: tuple[int, ...], source: tuple[Any, ...], target: tuple[Any, ...]
) -> None:
    layouts = Layout(shape, (3,), source), Layout(shape, (3,), target)
    byte = dtype_by_name("uint8")
    numbers = [*layouts[0].numbers, *layouts[1].numbers]
    arrays = [("uint8", (1,) * len(shape))] * 2
    for rank in range(3):
        group: Any = ranks(rank, 3)
        template = redistribution_template(group, layouts, byte)
        moves = redistribution_moves(*layouts, rank)
        same_program(group, template, numbers, moves, arrays)


def test_grids_of_many_dimensions_have_the_program_of_the_definition() -> None:
    grid = (1, 1, 2, 1, 1, 1, 1, 1, 1, 3)
    byte = dtype_by_name("uint8")
    layouts = (
        Layout((7, 5), grid, (Block(2), Cyclic(9))),
        Layout((7, 5), grid, (None, Block(9, (0, 4, 1)))),
    )
    numbers = [*layouts[0].numbers, *layouts[1].numbers]
    for rank in range(6):
        group: Any = ranks(rank, 6)
        template = redistribution_template(group, layouts, byte)
        parts = [layout.local_shape(rank) for layout in layouts]
        arrays = [("uint8", c_strides(part, "uint8")) for part in parts]
        moves = redistribution_moves(*layouts, rank)
        same_program(group, template, numbers, moves, arrays)


def test_lengths_that_do_not_fit_two_layouts_are_refused() -> None:
    byte = dtype_by_name("uint8")
    group: Any = ranks(0, 2)
    line = Layout((4,), (2,), (Block(0, (1, 3)),))
    template = redistribution_template(group, (line, line), byte)
    with pytest.raises(ValueError, match=r"2 lengths of two layouts: expected 6"):
        template.program([4, 4], [1, 1])
    other = Layout((4,), (3,), (Block(0),))
    with pytest.raises(ValueError, match=r"dimensions does not fit: .* of 2 ranks"):
        redistribution_template(group, (line, other), byte)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 7, 32767, 32768, 32769, 70000]), max_size=6),
    st.data(),
)
def test_stated_lengths_have_the_program_of_the_definition(
    counts: list[int], data: st.DataObject
) -> None:
    size, peers = 4, [None, 1, 2, 3]
    to = [data.draw(st.sampled_from(peers)) for _ in counts]
    leaves = [data.draw(st.booleans()) for _ in counts]

    def moves(starts: Sequence[Any], stops: Sequence[Any]) -> list[Move]:
        found = []
        for number, (low, high) in enumerate(zip(starts, stops, strict=True)):
            box = Box(0, (low,), (high,))
            there = Box(1, (low,), (high,))
            if to[number] is None:
                found.append(Move(0, number, None, box, there))
            elif leaves[number]:
                found.append(Move(0, number, to[number], box, None))
            else:
                found.append(Move(0, number, to[number], None, there))
        return found[::-1]

    ends = np.cumsum([0, *counts]).tolist()
    numbers = [at for pair in pairwise(ends) for at in pair]
    known = range(len(counts))
    group, double = ranks(0, size), dtype_by_name("float64")
    template = box_template(
        group,
        moves([Place(2 * i) for i in known], [Place(2 * i + 1) for i in known]),
        [(double, 1)] * 2,
        coll=70,
        label="boxes/direct",
        stated=True,
    )
    wanted = moves(ends[:-1], ends[1:])
    arrays = [("float64", (8,))] * 2
    same_program(group, template, numbers, wanted, arrays, stated=True)


def test_what_does_not_fit_a_template_is_refused() -> None:
    double = dtype_by_name("float64")
    box: Any = Box(0, (Place(0),), (Place(1),))
    group = ranks(0, 2)
    template = box_template(
        group, [Move(0, 0, 1, box, None)], [(double, 1)], coll=70, label="boxes/direct"
    )
    with pytest.raises(ValueError, match=r"number 1 of a call that has 1: expected"):
        template.program([0], [8])
    with pytest.raises(ValueError, match=r"2 strides for arrays of 1 dimensions"):
        template.program([0, 3], [8, 8])
    wrong = Box(1, (0,), (3,))
    with pytest.raises(ValueError, match=r"a box of array 1 with 1 dimensions does"):
        box_template(
            group, [Move(0, 0, 1, wrong, None)], [(double, 1)], coll=70, label="boxes"
        )
