# SPDX-License-Identifier: Apache-2.0
"""The check of single real numbers that a program passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["as_finite"]


def as_finite(value: Any) -> float | None:
    """Return a finite number of any library as Python's; None for all else.

    None also for text, for bools, and for integers beyond float64. Equal numbers have
    one ``repr``, whatever their type: 0.0 stands for -0.0, too.
    """
    if isinstance(value, bool | np.bool_ | str | bytes):
        return None
    try:
        found = float(value) + 0.0
    except Exception:  # noqa: BLE001 - an object of the program raises what it likes
        return None
    return found if math.isfinite(found) else None
