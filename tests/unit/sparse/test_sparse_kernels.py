# SPDX-License-Identifier: Apache-2.0
"""The sparse kernels against numpy, on drawn inputs of every kind."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt._native import sparse
from commrt.sparse.memory import Pool
from commrt.sparse.pieces import Elements, Piece, even_bounds
from commrt.sparse.result import bytes_from
from commrt.vocabulary.dtypes import DTYPES

Array = Any
NAMES = [dtype.name for dtype in DTYPES[:15]]
BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def numpy_type(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def drawn(rng: Any, length: int, fill: float, name: str, index: Any) -> Any:
    """Return sorted indices and small values, exact in every type."""
    indices = np.flatnonzero(rng.random(length) < fill).astype(index)
    low = 0 if name.startswith(("u", "bool")) else -3
    values = rng.integers(low, 4, len(indices)).astype(numpy_type(name))
    return indices, values


def dense(entries: Any, length: int) -> Array:
    indices, values = entries
    whole = np.zeros(length, values.dtype)
    whole[indices] = values
    return whole


def as_piece(entries: Any, length: int) -> Piece:
    indices, values = entries
    addresses = indices.ctypes.data, values.ctypes.data
    return Piece(0, length, False, len(indices), *addresses, entries)


def entries_of(elements: Elements, piece: Piece) -> tuple[Array, Array]:
    size = piece.count * elements.index_nbytes
    indices = bytes_from(piece.indices, size).view(elements.index_type)
    nbytes = piece.count * elements.dtype.itemsize
    values = bytes_from(piece.values, nbytes).view(numpy_type(elements.dtype.name))
    return indices.copy(), values.copy()


shapes = st.tuples(
    st.integers(0, 10_000),  # seed
    st.sampled_from([0, 1, 2, 63, 1000]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([np.int32, np.int64]),
    st.sampled_from(NAMES),
)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]), max_size=6),
    st.sampled_from([1, 64, 65, 8192, 8193, 30_000]),
    st.sampled_from([0, 7, 2**30]),
    st.sampled_from([np.int32, np.int64]),
    st.sampled_from(NAMES),
)
def test_sum_of_lists_is_the_sum_of_the_dense_vectors(
    seed: int, fills: list[float], length: int, first: int, index: Any, name: str
) -> None:
    rng = np.random.default_rng(seed)
    lists = [drawn(rng, length, fill, name, index) for fill in fills]
    shifted = [(indices + index(first), values) for indices, values in lists]
    num = sum(len(indices) for indices, _ in lists)
    itemsize = numpy_type(name).itemsize
    # What is behind the room must stay as it is.
    indices, values = (
        np.full(num + 8, 99, index),
        np.full((num + 8) * itemsize, 7, "u1"),
    )
    count = sparse.sum(
        np.dtype(index).itemsize,
        BY_NAME[name].code,
        [(i.ctypes.data, v.ctypes.data, len(i)) for i, v in shifted],
        first,
        first + length,
        indices.ctypes.data,
        values.ctypes.data,
    )
    want = np.zeros(length, numpy_type(name))
    for each in lists:
        whole = dense(each, length)
        want = (want | whole) if name == "bool" else (want + whole).astype(want.dtype)
    there = np.unique(np.concatenate([[], *(i for i, _ in lists)])).astype(index)
    assert count == len(there)
    assert np.array_equal(indices[:count], there + index(first))
    assert np.array_equal(values.view(want.dtype)[:count], want[there])
    assert (indices[num:] == 99).all()
    assert (values[num * itemsize :] == 7).all()


def test_sum_of_lists_keeps_what_an_entry_alone_is() -> None:
    """Signed zeros and NaN pass unchanged where no other list has the index."""
    values = np.array([-0.0, 0.0, np.nan, -np.inf], np.float32)
    lists = [(np.array([4 * i], np.int32), values[i : i + 1]) for i in range(4)]
    out, sums = np.empty(4, np.int32), np.empty(4, np.float32)
    given_ = [(i.ctypes.data, v.ctypes.data, 1) for i, v in lists]
    code = BY_NAME["float32"].code
    assert sparse.sum(4, code, given_, 0, 20, out.ctypes.data, sums.ctypes.data) == 4
    assert out.tolist() == [0, 4, 8, 12]
    assert np.array_equal(sums, values, equal_nan=True)
    assert np.array_equal(np.signbit(sums[:2]), [True, False])


@settings(max_examples=300, deadline=None)
@given(shapes)
def test_merge_is_the_sum_of_the_dense_vectors(shape: Any) -> None:
    seed, length, fill_a, fill_b, index, name = shape
    rng = np.random.default_rng(seed)
    a = drawn(rng, length, fill_a, name, index)
    b = drawn(rng, length, fill_b, name, index)
    num = len(a[0]) + len(b[0])
    indices = np.full(num + 1, 77, index)
    values = np.full(num + 1, 1, numpy_type(name))
    found = sparse.merge(
        np.dtype(index).itemsize,
        BY_NAME[name].code,
        a[0].ctypes.data,
        a[1].ctypes.data,
        len(a[0]),
        b[0].ctypes.data,
        b[1].ctypes.data,
        len(b[0]),
        indices.ctypes.data,
        values.ctypes.data,
    )
    assert (indices[num], values[num]) == (77, values.dtype.type(1))  # nothing beside
    union = np.union1d(a[0], b[0])
    np.testing.assert_array_equal(indices[:found], union)
    want = (dense(a, length) + dense(b, length)).astype(values.dtype)
    np.testing.assert_array_equal(values[:found], want[union])


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 7))
def test_split_pieces_and_their_sums_are_those_of_the_ranges(
    shape: Any, parts: int
) -> None:
    seed, length, fill_a, fill_b, index, name = shape
    rng = np.random.default_rng(seed)
    elements = Elements(np.dtype(index).itemsize, BY_NAME[name], Pool())
    both = [drawn(rng, length, fill, name, index) for fill in (fill_a, fill_b)]
    want = (dense(both[0], length) + dense(both[1], length)).astype(numpy_type(name))
    bounds = even_bounds(0, length, parts)
    split = [elements.split(as_piece(each, length), bounds) for each in both]
    for a, b in zip(*split, strict=True):
        merged = elements.merge(a, b)
        assert merged.dense == (
            b.length > 0
            and (a.count + b.count) * elements.entry_nbytes
            >= b.length * elements.dtype.itemsize
        ) or (b.length == 0)
        whole = elements.densified(merged)
        _, values = entries_of(elements, whole) if whole.count else (None, np.empty(0))
        np.testing.assert_array_equal(values, want[a.first : a.last])
        indices, values = entries_of(elements, elements.sparsified(whole))
        at = np.flatnonzero(want[a.first : a.last]) + a.first
        np.testing.assert_array_equal(indices, at)
        np.testing.assert_array_equal(values, want[at])


def test_a_value_of_one_input_keeps_every_bit() -> None:
    index = np.array([1], np.int32)
    other = np.array([2], np.int32)
    for bits in (0x80000000, 0x00000001, 0x7F800000, 0x7FC12345):
        value = np.array([bits], np.uint32)
        indices, values = np.empty(2, np.int32), np.empty(2, np.uint32)
        addresses = index.ctypes.data, value.ctypes.data, 1
        others = other.ctypes.data, value.ctypes.data, 1
        outs = indices.ctypes.data, values.ctypes.data
        sparse.merge(4, BY_NAME["float32"].code, *addresses, *others, *outs)
        assert values.tolist() == [bits, bits]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=2, max_size=40))
def test_sixteen_bit_floats_add_as_numpy_does(bits: list[int]) -> None:
    for name in ("float16", "bfloat16"):
        raw = np.array(bits[: len(bits) // 2 * 2], np.uint16).reshape(2, -1)
        a, b = raw.view(numpy_type(name))
        indices = np.arange(a.size, dtype=np.int64)
        out_i, out_v = np.empty(2 * a.size, np.int64), np.empty(2 * a.size, a.dtype)
        sparse.merge(
            8,
            BY_NAME[name].code,
            indices.ctypes.data,
            a.ctypes.data,
            a.size,
            indices.ctypes.data,
            b.ctypes.data,
            a.size,
            out_i.ctypes.data,
            out_v.ctypes.data,
        )
        with np.errstate(all="ignore"):
            want = (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)
        got = out_v[: a.size].astype(np.float64)
        np.testing.assert_array_equal(got, want.astype(np.float64))


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_the_first_wrong_index_is_found_wherever_it_is(index: Any) -> None:
    size, length = 9000, 20_000
    good = np.arange(0, 2 * size, 2, dtype=index)

    def first(x: Array) -> int:
        where: int = sparse.first_wrong(x.itemsize, x.ctypes.data, x.size, length)
        return where

    assert first(good) == size
    for at in (0, 1, 4095, 4096, 4097, size - 1):
        for value in (-1, length, int(good[at - 1]) if at else -5):
            bad = good.copy()
            bad[at] = value
            assert first(bad) == at


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(0, 300),
    st.floats(0, 1),
    st.sampled_from([name for name in NAMES if not name.startswith("complex")]),
)
def test_largest_takes_the_first_of_equal_magnitudes(
    seed: int, size: int, part: float, name: str
) -> None:
    rng = np.random.default_rng(seed)
    low = 0 if name.startswith(("u", "bool")) else -100
    x = rng.integers(low, 100, size).astype(numpy_type(name))
    k = int(part * size)
    found = np.empty(k, np.int64)
    sparse.largest(BY_NAME[name].code, x.ctypes.data, size, k, found.ctypes.data)
    order = np.lexsort((np.arange(size), -np.abs(x.astype(np.float64))))
    np.testing.assert_array_equal(found, np.sort(order[:k]))


def test_nan_and_the_least_integer_are_the_largest() -> None:
    found = np.empty(1, np.int64)
    x = np.array([1.0, np.inf, np.nan, -np.inf])
    sparse.largest(BY_NAME["float64"].code, x.ctypes.data, 4, 1, found.ctypes.data)
    assert found[0] == 2
    y = np.array([127, -127, -128, 5], np.int8)
    sparse.largest(BY_NAME["int8"].code, y.ctypes.data, 4, 1, found.ctypes.data)
    assert found[0] == 2


def test_buffers_are_used_again_once_nobody_refers_to_them() -> None:
    pool = Pool()
    first = pool.take(100_000)
    address = first.ctypes.data
    view = first[10:].view(np.uint8)
    del first
    assert pool.take(100_000).ctypes.data != address  # the view still does
    del view
    assert pool.take(99_999).ctypes.data == address
