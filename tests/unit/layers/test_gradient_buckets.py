# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients: how they are cut, ordered, and how long they are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.layers.data.bucket_size import SIZES, interpolated_us, longest_that_pays
from commrt.layers.data.buckets import cut, start_order
from commrt.layers.data.sparse_rows import as_sparse, dense_rows, empty_sparse, summed

LENGTHS = st.lists(st.integers(0, 100), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 120), st.sets(st.integers(0, 19)), st.randoms())
def test_each_parameter_is_in_one_bucket_and_none_is_too_long(
    lengths: list[int], most: int, alone: set[int], random: object
) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    buckets = cut(order, lengths, most, alone)
    assert [index for bucket in buckets for index in bucket] == order
    for bucket in buckets:
        assert len(bucket) == 1 or sum(lengths[i] for i in bucket) <= most
        assert len(bucket) == 1 or not alone & {*bucket}
    for one, other in pairwise(buckets):
        # None ends before it has to.
        could = sum(lengths[i] for i in one) + lengths[other[0]] <= most
        assert not could or alone & {*one, other[0]}


@given(st.data(), st.integers(1, 12))
def test_a_start_order_has_every_bucket_and_no_gaps(
    data: st.DataObject, count: int
) -> None:
    times = st.lists(st.floats(0, 10), min_size=count, max_size=count)
    ready, seconds = data.draw(times), data.draw(times)
    needed = data.draw(st.permutations(range(count)))
    order = start_order(ready, seconds, needed)
    assert sorted(order) == list(range(count))
    now = 0.0
    for place, bucket in enumerate(order):
        waiting = [other for other in order[place:] if ready[other] <= now]
        if waiting:
            assert needed[bucket] == min(needed[other] for other in waiting)
        else:
            now = min(ready[other] for other in order[place:])
            assert ready[bucket] == now
        now += seconds[bucket]


def test_what_is_needed_first_overtakes_what_waits() -> None:
    # Backward: the last layer's bucket is there first. While it is under way all
    # others come: then the first layer goes first.
    assert start_order([0, 1, 2, 3], [10, 1, 1, 1], [3, 2, 1, 0]) == [0, 3, 2, 1]
    # Nothing waits for anything: they go as they come.
    assert start_order([0, 1, 2, 3], [0.5] * 4, [3, 2, 1, 0]) == [0, 1, 2, 3]


@given(st.floats(1, 1000), st.floats(1e-6, 1e-1))
def test_buckets_are_as_long_as_joining_them_pays(alpha: float, beta: float) -> None:
    points = {size: alpha + beta * size for size in SIZES}
    found = longest_that_pays(points)
    assert found in SIZES

    def saving(size: int) -> float:
        apart = 2 * (20 + points[size])
        return 1 - (20 + points[2 * size]) / apart

    longer = [size for size in SIZES[:-1] if size >= found]
    assert all(saving(size) <= 0.1 + 1e-9 for size in longer)
    shorter = [size for size in SIZES if size < found]
    assert not shorter or saving(shorter[-1]) > 0.1 - 1e-9


def test_times_between_points_lie_on_lines() -> None:
    assert interpolated_us({100: 10.0, 300: 30.0}, 200) == 20.0
    assert interpolated_us({100: 10.0, 300: 30.0}, 10**9) == 30.0
    assert interpolated_us({}, 5) == 0.0


@pytest.mark.parametrize("shape", [(1, 1), (5,), (5, 3), (5, 2, 2), (4, 0)])
def test_rows_that_come_several_times_are_added_up(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(0, shape[0], 7)
    values = rng.standard_normal((7, *shape[1:]))
    dense = np.zeros(shape)
    np.add.at(dense, rows, values)
    found = as_sparse((rows, values), shape, "it")
    np.testing.assert_allclose(found.to_dense(), dense, atol=1e-12)
    twice = summed(found, as_sparse((rows[:2], values[:2]), shape, "it"))
    np.add.at(dense, rows[:2], values[:2])
    np.testing.assert_allclose(twice.to_dense(), dense, atol=1e-12)
    back = np.zeros(shape)
    at, parts = dense_rows(twice)
    back[at] = parts
    np.testing.assert_allclose(back, dense, atol=1e-12)
    nothing = empty_sparse(shape, np.dtype(np.float64))
    assert summed(nothing, nothing).nnz == 0
