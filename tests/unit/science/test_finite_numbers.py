# SPDX-License-Identifier: Apache-2.0
"""Numbers of any library become Python's, and equal ones are written alike."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from commrt.science.numbers import as_finite


@pytest.mark.parametrize(
    "value", [2, 2.0, np.int64(2), np.float32(2), np.array(2.0), Fraction(2)]
)
def test_equal_numbers_are_written_alike(value: Any) -> None:
    assert repr(as_finite(value)) == "2.0"


def test_minus_zero_is_written_as_zero() -> None:
    assert repr(as_finite(-0.0)) == "0.0"


@pytest.mark.parametrize(
    "value",
    [
        *("2", b"2", None, True, np.bool_(True), 1j, [1.0, 2.0], object()),
        *(float("nan"), float("inf"), 10**400, 10**5000, Decimal("1e400")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_finite_number_is_none(value: Any) -> None:
    assert as_finite(value) is None
