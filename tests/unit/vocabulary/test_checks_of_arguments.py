# SPDX-License-Identifier: Apache-2.0
"""Checks of single arguments, and how messages show what was passed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

from commrt.errors import UsageError, shown
from commrt.vocabulary.checks import as_integer, as_items, check_name


class Raising:
    """Raises whatever it is asked."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ZeroDivisionError("the program's own mistake")

    __index__ = __iter__ = __repr__ = _refuse  # type: ignore[assignment]


def raising_later() -> Iterator[int]:
    yield 1
    raise ZeroDivisionError("the program's own mistake")


@pytest.mark.parametrize(
    ("values", "items"),
    [
        ([1, 2], [1, 2]),
        ((), []),
        (iter([3]), [3]),
        (np.array([4, 5]), [4, 5]),
        (range(2), [0, 1]),
    ],
)
def test_items_of_sequences_and_iterators(values: Any, items: list[int]) -> None:
    assert as_items(values) == items


@pytest.mark.parametrize(
    "values",
    [
        *(None, 3, "12", b"12", {1, 2}, {1: 2}, np.array(4), int, Raising()),
        *(range(2**40), itertools.count(), raising_later()),
    ],
    ids=lambda values: type(values).__name__,
)
def test_what_has_no_items_in_order_or_no_end(values: Any) -> None:
    assert as_items(values) is None


def test_an_integer_that_cannot_be_asked_is_none() -> None:
    assert as_integer(Raising()) is None
    assert as_integer(np.array(4)) == 4


@pytest.mark.parametrize("name", [5, b"name", "\ud800", "a\ud800b", ["a"], Raising()])
def test_names_are_strings_that_utf_8_can_write(name: Any) -> None:
    with pytest.raises(UsageError, match=r"^dup: name=.* must be a string that UTF-8"):
        check_name("dup", name)


def test_names_that_are_right() -> None:
    assert check_name("dup", None) is None
    assert check_name("dup", "größe") == "größe"
    assert type(check_name("dup", np.str_("a"))) is str


def test_long_values_are_shortened() -> None:
    assert shown([1, 2]) == "[1, 2]"
    text = shown("x" * 100_000)
    assert len(text) < 250
    assert text.endswith("... (100002 characters)")


def test_values_that_cannot_be_written_are_shown_by_their_types() -> None:
    assert shown(10**5000) == "<an integer of 16610 bits>"
    assert shown(Raising()) == "<a Raising that cannot be shown>"
