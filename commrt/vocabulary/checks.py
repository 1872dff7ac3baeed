# SPDX-License-Identifier: Apache-2.0
"""Checks of single arguments: flags and integers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from commrt.errors import UsageError

__all__ = ["as_integer", "check_flag"]


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
