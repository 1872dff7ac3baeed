# SPDX-License-Identifier: Apache-2.0
"""Stacks of lower triangular matrices are inverted, of every size."""

from __future__ import annotations

import numpy as np
import pytest

from commrt.science.vecchia.triangular import inverse_of_lower


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 9, 16, 17, 40, 95])
def test_the_inverse_times_the_matrix_is_one(size: int) -> None:
    rng = np.random.default_rng(size)
    full = rng.standard_normal((3, size, size)) / max(size, 1)
    lower = np.tril(full) + 2.0 * np.eye(size)
    found = inverse_of_lower(lower)
    one = np.broadcast_to(np.eye(size), lower.shape)
    np.testing.assert_allclose(found @ lower, one, atol=1e-13)
    assert (np.triu(found, 1) == 0).all()


def test_elements_above_the_diagonal_are_not_looked_at() -> None:
    lower = np.tril(np.random.default_rng(0).uniform(1, 2, (2, 20, 20)))
    filled = lower + np.triu(np.full((20, 20), np.nan), 1)
    np.testing.assert_array_equal(inverse_of_lower(filled), inverse_of_lower(lower))


def test_a_matrix_has_the_same_bits_in_every_stack() -> None:
    rng = np.random.default_rng(1)
    stack = np.tril(rng.standard_normal((9, 50, 50))) + 60.0 * np.eye(50)
    whole = inverse_of_lower(stack)
    for place in range(len(stack)):
        alone = inverse_of_lower(stack[place : place + 1])
        np.testing.assert_array_equal(alone[0], whole[place])
