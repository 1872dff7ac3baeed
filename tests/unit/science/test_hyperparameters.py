# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters refuse what is none, and keep fixed numbers to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.errors import UsageError
from commrt.science.vecchia import Hyperparameters
from commrt.science.vecchia.hyperparameters import decoded, encoded, with_numbers


@pytest.mark.parametrize(
    ("scales", "variance", "nugget", "says"),
    [
        ([1.0, 0.0], 1.0, 0.1, "length_scales"),
        ([1.0, np.inf], 1.0, 0.1, "length_scales"),
        ([[1.0]], 1.0, 0.1, "length_scales"),
        ("wide", 1.0, 0.1, "no numbers"),
        ([1.0], 0.0, 0.1, "variance"),
        ([1.0], np.nan, 0.1, "variance"),
        ([1.0], None, 0.1, "no numbers"),
        ([10**400], 1.0, 0.1, "no numbers"),
        ([1.0], 10**400, 0.1, "no numbers"),
        ([1.0], 1.0, -1e-9, "nugget"),
        ([1.0], 1.0, np.inf, "nugget"),
    ],
)
def test_wrong_hyperparameters_are_refused(
    scales: Any, variance: Any, nugget: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Hyperparameters(scales, variance, nugget)


def test_hyperparameters_are_a_copy_that_never_changes() -> None:
    scales = np.array([1.0, 2.0])
    values = Hyperparameters(scales, 1, 0)
    scales[0] = 9.0
    assert values.length_scales.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        values.length_scales[0] = 3.0


def test_logarithms_give_the_numbers_back() -> None:
    values = Hyperparameters([0.3, 700.0], 2.5, 1e-7)
    found = with_numbers(values, decoded(encoded(values)), ())
    np.testing.assert_allclose(found.exact, values.exact, rtol=1e-15)


def test_fixed_numbers_have_the_bits_of_the_start() -> None:
    values = Hyperparameters([0.3, 700.0], 2.5, 0.0)
    numbers = decoded(encoded(values) + 1.0)
    found = with_numbers(values, numbers, ("length_scales", "nugget"))
    assert found.exact[:2] == values.exact[:2]
    assert found.nugget == 0.0
    assert found.variance == pytest.approx(2.5 * np.e)
