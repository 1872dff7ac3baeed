# SPDX-License-Identifier: Apache-2.0
"""Layouts: what each rank has, what two ranks have in common, what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import draw_layout, draw_shape, indices

from commrt import Block, Cyclic, Layout
from commrt.boxes.layouts import Runs, common_runs
from commrt.boxes.redistribution import redistribution_moves
from commrt.errors import UsageError

SEEDS = st.integers(0, 10**9)


@settings(deadline=None)
@given(SEEDS)
def test_local_shapes_are_numpys(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 12)
    layout = draw_layout(rng, draw_shape(rng), size)
    for rank in range(size):
        shape = tuple(map(len, indices(layout, rank)))
        assert layout.local_shape(rank) == shape


def expand(run: Runs) -> list[tuple[int, int]]:
    return [
        (
            run.source + turn * run.source_step + i,
            run.target + turn * run.target_step + i,
        )
        for turn in range(run.count)
        for i in range(run.length)
    ]


@settings(deadline=None)
@given(SEEDS)
def test_runs_are_what_two_ranks_have_in_common(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 12)
    shape = tuple(rng.randint(1, 400) for _ in range(rng.randint(1, 3)))
    source, target = (draw_layout(rng, shape, size) for _ in range(2))
    one, other = rng.randrange(size), rng.randrange(size)
    found = common_runs(source, one, target, other)
    for runs, left, right in zip(
        found, indices(source, one), indices(target, other), strict=True
    ):
        pairs = [pair for run in runs for pair in expand(run)]
        assert len(set(pairs)) == len(pairs)
        _, at, there = np.intersect1d(left, right, return_indices=True)
        assert sorted(pairs) == sorted(zip(at.tolist(), there.tolist(), strict=True))


def test_periodic_patterns_need_few_runs() -> None:
    million = (10**6,)
    one = Layout(million, (4,), (Cyclic(0, 1),))
    other = Layout(million, (4,), (Cyclic(0, 3),))
    block = Layout(million, (4,), (Block(0),))
    assert len(common_runs(one, 1, other, 2)[0]) <= 4
    assert len(common_runs(one, 1, block, 2)[0]) <= 2
    assert common_runs(block, 1, block, 1)[0] == [Runs(0, 0, 250_000)]
    assert common_runs(other, 1, other, 1)[0] == [Runs(0, 0, 250_002 - 2)]


@settings(deadline=None, max_examples=50)
@given(SEEDS)
def test_every_element_comes_from_one_rank_and_its_own_where_it_can(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 8)
    shape = draw_shape(rng)
    source, target = (draw_layout(rng, shape, size) for _ in range(2))
    for rank in range(size):
        moves = redistribution_moves(source, target, rank)
        taken = [move for move in moves if move.target is not None]
        wanted = int(np.prod(target.local_shape(rank)))
        assert sum(int(np.prod(move.shape)) for move in taken) == wanted
        own = np.prod(
            [
                len(np.intersect1d(a, b))
                for a, b in zip(
                    indices(source, rank), indices(target, rank), strict=True
                )
            ]
        )
        kept = sum(int(np.prod(move.shape)) for move in taken if move.peer is None)
        assert kept == own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout((4,), (2,), ()), "dims has 0 entries"),
        (lambda: Layout((4,), (2,), 3), "dims=3 must be a sequence"),  # type: ignore[arg-type]
        (lambda: Layout((-1,), (2,), (None,)), "shape=.* integers from 0"),
        (lambda: Layout((4,), (0,), (None,)), "grid=.* integers from 1"),
        (lambda: Layout((4,), (2,), ("b",)), "must be Block, Cyclic or None"),  # type: ignore[arg-type]
        (lambda: Layout((4,), (2,), (Block(1),)), r"expected 0\.\.0"),
        (
            lambda: Layout((4,), (2,), (Cyclic(0, 0),)),
            "block=0 must be an integer from 1",
        ),
        (
            lambda: Layout((4, 4), (2, 2), (Block((1, 0)), Cyclic(0))),
            "uses dimension 0 of the grid a second time",
        ),
        (
            lambda: Layout((4,), (2, 2), (Block((1, 1)),)),
            "uses dimension 1 of the grid a second time",
        ),
        (lambda: Layout((4,), (2, 2), (Block((0, 2)),)), r"expected 0\.\.1"),
        (lambda: Block(()), r"dim=\(\) must name a dimension"),
        (lambda: Block((0, -1)), "dim=.* integers from 0"),
        (
            lambda: Layout((4, 4), (2,), (Block(0), Cyclic(0))),
            "uses dimension 0 of the grid a second time",
        ),
        (
            lambda: Layout((4,), (2,), (Block(0, (1, 2)),)),
            "do not cover dimension 0 of the array: expected 2 numbers, with the sum 4",
        ),
        (lambda: Layout((4,), (2,), (Block(0, (4,)),)), "do not cover"),
        (lambda: Layout((4,), (2,), (None,)).local_shape(2), r"expected 0\.\.1"),
    ],
)
def test_wrong_layouts_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
