# SPDX-License-Identifier: Apache-2.0
"""What looks for NaN and infinity, and the checksum of memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

from commrt import _native
from commrt.vocabulary.dtypes import dtype_by_name

FLOATS = [
    np.dtype(t)
    for t in ("float16", "float32", "float64", "complex64", "complex128", bfloat16)
]
SIZES = (1, 2, 7, 63, 2047, 2048, 2049, 10_001)


def found(x: np.ndarray) -> tuple[int, bool]:
    code = dtype_by_name(x.dtype.name).code
    index, is_nan = _native.first_not_finite(code, x.ctypes.data, x.size)
    return index, is_nan


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_first_one_is_found_wherever_it_is(
    dtype: np.dtype, size: int, seed: int
) -> None:
    rng = random.Random(f"{seed} {size}")
    info = np.finfo(dtype) if dtype != np.dtype(bfloat16) else None
    x = np.ones(size, dtype)
    if info is not None:  # the largest and the smallest numbers are numbers
        x[::2], x[1::3] = info.max, info.tiny / 2
        x[::5] = -info.max
    assert found(x) == (-1, False)
    assert found(x[:0]) == (-1, False)
    for value in ("nan", "-nan", "inf", "-inf"):
        for at in {0, size - 1, rng.randrange(size)}:
            y = x.copy()
            y[at] = float(value)
            y[at + 1 :: 2] = float("inf")
            assert found(y) == (at, "nan" in value), (value, at)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_either_part_of_a_complex_number_counts(dtype: str) -> None:
    x = np.ones(5, dtype)
    x[3] = complex(1, np.inf)
    assert found(x) == (3, False)
    x[2] = complex(np.nan, 1)
    assert found(x) == (2, True)


def test_types_of_eight_bits() -> None:
    x = np.ones(9, float8_e5m2)
    x[4] = np.inf
    assert found(x) == (4, False)
    x[2] = np.nan
    assert found(x) == (2, True)
    y = np.full(9, 448, float8_e4m3fn)  # the largest; it has no infinity
    assert found(y) == (-1, False)
    y[8] = np.nan
    assert found(y) == (8, True)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "int64"])
def test_integers_are_always_finite(dtype: str) -> None:
    assert found(np.full(100, -1).astype(dtype)) == (-1, False)


def sum_of(data: np.ndarray) -> int:
    total: int = _native.checksum(data.ctypes.data, data.nbytes)
    return total


@pytest.mark.parametrize("nbytes", [1, 7, 8, 31, 32, 33, 100, 1000])
def test_every_single_flip_and_every_swap_changes_the_checksum(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    sums = {sum_of(data)}
    for bit in range(8 * nbytes):
        data[bit // 8] ^= 1 << (bit % 8)
        sums.add(sum_of(data))
        data[bit // 8] ^= 1 << (bit % 8)
    assert len(sums) == 1 + 8 * nbytes
    if nbytes >= 64 and data[:8].tolist() != data[32:40].tolist():
        swapped = data.copy()
        swapped[:8], swapped[32:40] = data[32:40], data[:8]
        assert sum_of(swapped) not in sums


def test_lengths_and_zeros_count() -> None:
    zeros = np.zeros(200, np.uint8)
    assert len({sum_of(zeros[:n]) for n in range(200)}) == 200


def test_the_checksum_does_not_depend_on_where_the_memory_lies() -> None:
    data = np.random.default_rng(0).integers(0, 256, 300, np.uint8)
    room = np.empty(400, np.uint8)
    for at in range(9):
        room[at : at + 300] = data
        assert sum_of(room[at : at + 300]) == sum_of(data)
