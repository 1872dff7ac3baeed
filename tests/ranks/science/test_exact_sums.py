# SPDX-License-Identifier: Apache-2.0
"""Sums have the same bits, however terms lie on ranks, and are right to the last."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from science_cases import RANKS, cut_of

from commrt.local import run
from commrt.science.exact_sums import exact_sum

Array = np.ndarray[Any, Any]


def sums_of(terms: Array, size: int, seed: int = 0) -> list[Array]:
    """Return the sum as each rank has it."""
    pieces = cut_of(len(terms), size, seed)
    return run(size, lambda comm: exact_sum(terms[pieces[comm.rank]], comm))


@pytest.mark.parametrize("size", RANKS)
def test_sums_are_rounded_once(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-6, 7, (300, 3))
    terms = rng.standard_normal((300, 3)) * scales
    wanted = [math.fsum(column) for column in terms.T]
    for found in sums_of(terms, size, seed):
        assert found.tolist() == wanted


def test_terms_that_cancel_leave_what_is_small() -> None:
    terms = np.array([[1e16], [1.0], [-1e16], [2.0**-20]])
    for size in (1, 2, 4):
        assert sums_of(terms, size)[0].tolist() == [1.0 + 2.0**-20]


def test_bits_do_not_depend_on_the_cut_where_small_terms_are_dropped(seed: int) -> None:
    """Terms reach below 2^-90 of the largest: the sum is not exact, but the same."""
    rng = np.random.default_rng(seed)
    terms = rng.standard_normal((200, 2)) * 2.0 ** rng.integers(-120, 0, (200, 2))
    found = {sums_of(terms, size, seed)[0].tobytes() for size in RANKS}
    assert len(found) == 1


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e300])
def test_very_small_and_very_large_numbers(scale: float) -> None:
    terms = np.array([[3.0], [-1.0], [5.0]]) * scale
    for size in (1, 3):
        assert sums_of(terms, size)[0].tolist() == [7.0 * scale]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_column_with_nan_or_infinity_is_nan_on_all_ranks(wrong: float) -> None:
    terms = np.ones((5, 2))
    terms[3, 1] = wrong
    for size in (1, 2, 4):
        for found in sums_of(terms, size):
            assert found[0] == 5.0
            assert math.isnan(found[1])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_rows_and_no_columns(size: int) -> None:
    assert sums_of(np.empty((0, 2)), size)[0].tolist() == [0.0, 0.0]
    assert sums_of(np.empty((4, 0)), size)[0].tolist() == []
    assert sums_of(np.zeros((4, 1)), size)[0].tolist() == [0.0]
