# SPDX-License-Identifier: Apache-2.0
"""Checks of single arguments: flags, integers, timeouts."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from commrt.errors import UsageError

__all__ = ["as_integer", "check_flag", "check_timeout"]


def check_flag(what: str, argument: str, value: Any) -> bool:
    """Return a boolean argument; UsageError for what is merely true or false."""
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{what}: {argument}={value!r} must be True or False")
    return bool(value)


def as_integer(value: Any) -> int | None:
    """Return an integer of any library as Python's; None for bools and all else."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_timeout(what: str, timeout_s: Any) -> float:
    """Return a number of seconds above 0, or raise UsageError."""
    number = isinstance(timeout_s, int | float | np.integer | np.floating)
    if not number or isinstance(timeout_s, bool) or not timeout_s > 0:
        raise UsageError(
            f"{what}: timeout_s={timeout_s!r} must be a number of seconds above 0"
        )
    try:
        return float(timeout_s)
    except OverflowError:
        return math.inf
