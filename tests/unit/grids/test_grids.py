# SPDX-License-Identifier: Apache-2.0
"""The geometry of grids: places, neighbours, chosen dimensions, named axes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.errors import UsageError
from commrt.grids.geometry import Grid, fill_dims, make_grid, ranks_along
from commrt.grids.mesh import parse_axes

DIMS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(DIMS, st.data())
def test_ranks_and_places_are_numpys(dims: list[int], data: st.DataObject) -> None:
    grid = make_grid(math.prod(dims), dims, False)
    rank = data.draw(st.integers(0, grid.size - 1))
    coords = grid.coords_of(rank)
    assert coords == tuple(map(int, np.unravel_index(rank, dims)))
    assert grid.rank_at(coords) == rank


@given(DIMS, st.data())
def test_neighbors_are_numpys_roll(dims: list[int], data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=len(dims), max_size=len(dims))
    periodic = data.draw(flags)
    grid = make_grid(math.prod(dims), dims, periodic)
    ranks = np.arange(grid.size).reshape(dims)
    for rank in range(grid.size):
        here, found = grid.coords_of(rank), grid.neighbors(rank)
        assert len(found) == 2 * len(dims)
        for dim, wraps in enumerate(periodic):
            for side, step in enumerate((-1, 1)):
                place = here[dim] + step
                outside = not wraps and not 0 <= place < dims[dim]
                rolled = int(np.roll(ranks, -step, axis=dim)[here])
                assert found[2 * dim + side] == (None if outside else rolled)


def test_shifts_reach_over_several_places_and_both_ways() -> None:
    grid = Grid((5, 3), (True, False))
    assert grid.shift(0, 0, 2) == (9, 6)
    assert grid.shift(0, 0, -2) == (6, 9)
    assert grid.shift(0, 0, 7) == (9, 6)
    assert grid.shift(0, 0, 0) == (0, 0)
    assert grid.shift(1, 1, 1) == (0, 2)
    assert grid.shift(0, 1, 1) == (None, 1)
    assert grid.shift(2, 1, 2) == (0, None)
    assert grid.at_offset(0, (-1, 1)) == 13
    assert grid.at_offset(0, (1, -1)) is None


@pytest.mark.parametrize(
    ("size", "dims", "filled"),
    [
        (1, (0, 0), (1, 1)),
        (6, (0,), (6,)),
        (6, (0, 0), (3, 2)),
        (7, (0, 0), (7, 1)),
        (12, (0, 0), (4, 3)),
        (16, (0, 0, 0), (4, 2, 2)),
        (36, (0, 0, 0), (4, 3, 3)),
        (24, (0, 2, 0), (4, 2, 3)),
        (24, (2, 3, 4), (2, 3, 4)),
        (1024, (0, 0, 0), (16, 8, 8)),
        (997, (0, 0, 0, 0), (997, 1, 1, 1)),
    ],
)
def test_dimensions_are_chosen_evenly(
    size: int, dims: tuple[int, ...], filled: tuple[int, ...]
) -> None:
    assert fill_dims("cart", size, dims) == filled


@given(st.integers(1, 200), st.integers(1, 3))
def test_no_other_choice_has_a_smaller_largest(size: int, count: int) -> None:
    found = fill_dims("cart", size, [0] * count)
    assert math.prod(found) == size
    assert list(found) == sorted(found, reverse=True)
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    best = min(
        max(each)
        for each in itertools.product(divisors, repeat=count)
        if math.prod(each) == size
    )
    assert found[0] == best


def test_ranks_along_some_dimensions_have_the_others_in_common() -> None:
    grid = Grid((2, 3, 2), (False,) * 3)
    assert ranks_along(grid, [1], (1, 0, 1)) == [7, 9, 11]
    assert ranks_along(grid, [0, 2], (1, 2, 0)) == [4, 5, 10, 11]
    assert ranks_along(grid, [2, 0], (1, 2, 0)) == [4, 10, 5, 11]


@pytest.mark.parametrize(
    ("dims", "periodic", "message"),
    [
        ((2, 2), False, r"cart: dims=\(2, 2\) have 4 places, expected 6, one for each"),
        ((3, 4), False, r"dims=\(3, 4\) have 12 places, expected 6"),
        (
            (4, 0),
            False,
            r"dims=\(4, 0\) cannot be filled in for 6 ranks: .* 4 is given",
        ),
        ((), False, r"dims=\(\) must be one or more numbers from 1"),
        ((-2, -3), False, r"dims=\(-2, -3\) must be one or more"),
        ((2, 3.0), False, r"dims=\(2, 3.0\) must be a sequence of integers"),
        ((True, 6), False, "must be a sequence of integers"),
        (6, False, "dims=6 must be a sequence of integers"),
        ("23", False, "dims='23' must be a sequence of integers"),
        ((2, 3), (True,), r"periodic=\(True,\) must be .* each of the 2 dimensions"),
        ((2, 3), (1, 0), r"periodic=\(1, 0\) must be True or False"),
        ((2, 3), None, "periodic=None must be True or False"),
    ],
)
def test_wrong_grids_say_what_was_expected(
    dims: Any, periodic: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_grid(6, dims, periodic)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: g.coords_of(6),
            r"rank=6 is not a rank of the grid; expected 0\.\.5",
        ),
        (lambda g: g.coords_of(-1), "rank=-1 is not a rank"),
        (lambda g: g.rank_at((1,)), r"coords=\(1,\) has 1 numbers, expected 2"),
        (lambda g: g.rank_at((2, 0)), r"coords=\(2, 0\) is outside 2x3, periodic"),
        (lambda g: g.rank_at((0, -1)), r"coords=\(0, -1\) is outside 2x3"),
        (lambda g: g.check_dim("shift", 2), r"shift: dim=2 is not a dimension of 2x3"),
        (lambda g: g.check_dim("shift", "x"), "dim='x' is not a dimension"),
    ],
)
def test_wrong_places_say_what_was_expected(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(Grid((2, 3), (False, False)))


def test_periodic_places_wrap_around() -> None:
    grid = Grid((2, 3), (True, False))
    assert grid.rank_at((-1, 2)) == grid.rank_at((3, 2)) == 5


def test_axes_are_names_with_numbers() -> None:
    assert parse_axes(8, {"data": 2, "tensor": 4}) == {"data": 2, "tensor": 4}
    assert parse_axes(8, [("data", 0), ("tensor", 4)]) == {"data": 2, "tensor": 4}
    assert list(parse_axes(8, {"b": 2, "a": 4})) == ["b", "a"]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3, "tensor": 2}, r"mesh: dims=\(3, 2\) have 6 places, expected 8"),
        ({"data": 16}, r"dims=\(16,\) have 16 places, expected 8"),
        ({}, r"axes={} must be names with numbers of ranks"),
        ([("data", 2), ("data", 4)], "axis 'data' is named twice"),
        ({"data,x": 8}, "axis 'data,x' must be a name"),
        ({"": 8}, "axis '' must be a name"),
        ({3: 8}, "axis 3 must be a name"),
        (8, "axes=8 must be names with numbers of ranks"),
        (["data", "tensor"], "axes=.* must be names with numbers"),
    ],
)
def test_wrong_axes_say_what_was_expected(axes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_axes(8, axes)
