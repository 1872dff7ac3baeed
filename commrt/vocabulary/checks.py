# SPDX-License-Identifier: Apache-2.0
"""Checks of single arguments: flags, integers, names, lists."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Any

import numpy as np

from commrt.errors import UsageError, shown

__all__ = [
    "LARGEST_TAG",
    "as_integer",
    "as_items",
    "check_flag",
    "check_name",
    "typed",
]

LARGEST_TAG = 2**31 - 1
"""Of messages."""

_MOST_ITEMS = 1_000_000


def check_flag(what: str, argument: str, value: Any) -> bool:
    """Return a boolean argument; UsageError for what is merely true or false."""
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{what}: {argument}={shown(value)} must be True or False")
    return bool(value)


def as_integer(value: Any) -> int | None:
    """Return an integer of any library as Python's; None for bools and all else."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except Exception:  # noqa: BLE001 - an object of the program raises what it likes
        return None


def as_items(values: Any) -> list[Any] | None:
    """Return the items of a sequence or iterator; None for all else.

    Sets and mappings have no order that ranks could agree on. Nothing is read without
    an end, so a million items are the most.
    """
    if isinstance(values, Set | Mapping | str | bytes):
        return None
    try:
        found = list(islice(values, _MOST_ITEMS + 1))
    except Exception:  # noqa: BLE001 - an object of the program raises what it likes
        return None
    return found if len(found) <= _MOST_ITEMS else None


def check_name(what: str, name: Any) -> str | None:
    """Return the name of something new, None without one; else UsageError."""
    if name is None:
        return None
    is_text = isinstance(name, str)
    if is_text:
        try:
            return str(name.encode(), "utf-8")
        except UnicodeEncodeError:
            is_text = False
    raise UsageError(
        f"{what}: name={shown(name)} must be a string that UTF-8 can write, or None"
    )


def typed(values: Sequence[Any]) -> Any:
    """Return a key that is equal for values that are equal and of equal types.

    1, 1.0 and True are equal, and an option may take only one of them. TypeError for
    values other than numbers, texts, None and tuples or lists of these.
    """
    kinds = tuple(map(type, values))
    if _PLAIN.issuperset(kinds):
        return kinds, tuple(values)
    return kinds, tuple(map(_typed, values, kinds))


_PLAIN = frozenset({int, bool, float, str, type(None)})


def _typed(value: Any, kind: type) -> Any:
    if kind in (tuple, list):
        return typed(value)
    if kind not in _PLAIN:
        raise TypeError(f"a {kind.__name__} may be equal to what it is not")
    return value
