# SPDX-License-Identifier: Apache-2.0
"""Covariances are those of the books, and slopes are their derivatives."""

from __future__ import annotations

import numpy as np
import pytest
from science_cases import correlation

from commrt.science.vecchia.covariances import COVARIANCES


@pytest.mark.parametrize("kernel", COVARIANCES)
def test_covariances_are_those_of_the_books(kernel: str) -> None:
    s = np.array([0.0, 1e-12, 0.01, 0.5, 1.0, 7.0, 400.0])
    value, _ = COVARIANCES[kernel](s)
    np.testing.assert_allclose(value, correlation(kernel, s), rtol=1e-13, atol=1e-300)
    assert value[0] == 1.0


@pytest.mark.parametrize("kernel", COVARIANCES)
def test_slopes_are_derivatives_by_the_squared_distance(kernel: str) -> None:
    s = np.array([0.01, 0.3, 1.0, 4.0])
    step = 1e-6
    _, slope = COVARIANCES[kernel](s)
    above, below = (COVARIANCES[kernel](s + sign * step)[0] for sign in (1, -1))
    np.testing.assert_allclose(slope, (above - below) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize("kernel", COVARIANCES)
def test_points_at_one_place_have_finite_slopes(kernel: str) -> None:
    """The slope of matern12 is infinite there, and is multiplied by 0."""
    value, slope = COVARIANCES[kernel](np.zeros((2, 2)))
    assert np.isfinite(slope).all()
    assert (value == 1).all()
