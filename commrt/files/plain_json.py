# SPDX-License-Identifier: Apache-2.0
"""JSON of others: parsed within limits, and read field by field with types and ranges.

A field knows its place, as in ``$.samples[3].us[0]``, and its errors name it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from commrt.files.visible import visible

__all__ = ["MOST_INTEGER", "Field", "MalformedError", "parsed"]

MOST_INTEGER = (1 << 62) - 1
"""Largest number of bytes, nanoseconds or calls that a file may state."""
_MOST_SHOWN = 40
_ANY = -MOST_INTEGER

T = TypeVar("T")


class MalformedError(ValueError):
    """A text is no JSON, or a field has another type or range; says where and why."""


def parsed(text: str, place: str = "$") -> Field:
    """Return the one value in a text; MalformedError where it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise MalformedError(f"{place}: nested too deeply") from None
    except ValueError as error:
        raise MalformedError(f"{place}: not JSON: {error}") from None
    return Field(value, place)


def _is_writable(text: str) -> bool:
    """Return False for halves of characters, which JSON can hold and no file can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


class Field:
    """One value of a file, and its place there."""

    __slots__ = ("place", "value")

    def __init__(self, value: Any, place: str) -> None:
        self.value = value
        self.place = place

    def wrong(self, expected: str) -> MalformedError:
        """Return the error for this value."""
        shown = visible(repr(self.value))
        if len(shown) > _MOST_SHOWN:
            shown = shown[:_MOST_SHOWN] + "..."
        return MalformedError(f"{self.place}: expected {expected}, found {shown}")

    def integer(self, low: int = 0, high: int = MOST_INTEGER) -> int:
        """Return a whole number from ``low`` to ``high``."""
        value = self.value
        if type(value) is not int or not low <= value <= high:
            above = f" to {high}" if high != MOST_INTEGER else " on"
            raise self.wrong(f"a whole number from {low}{above}")
        return value

    def any_integer(self) -> int:
        """Return a whole number of either sign."""
        return self.integer(_ANY)

    def number(self, *, above: float, most: float) -> float:
        """Return a number between two others, the upper one included."""
        value = self.value
        if type(value) not in (int, float) or not above < value <= most:
            raise self.wrong(f"a number above {above:g}, up to {most:g}")
        return float(value)

    def flag(self) -> bool:
        """Return true or false."""
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value

    def text(self, most: int = 10_000) -> str:
        """Return text of at most so many characters."""
        if type(self.value) is not str or len(self.value) > most:
            raise self.wrong(f"text of at most {most} characters")
        if not _is_writable(self.value):
            raise self.wrong("text that UTF-8 can write")
        return self.value

    def one_of(self, words: Sequence[str]) -> str:
        """Return one of these words."""
        if type(self.value) is not str or self.value not in words:
            raise self.wrong(f"one of {', '.join(words)}")
        return self.value

    def items(self, most: int = MOST_INTEGER) -> Iterator[Field]:
        """Yield the members of a list of at most so many."""
        if type(self.value) is not list or len(self.value) > most:
            raise self.wrong(
                "a list" if most == MOST_INTEGER else f"a list of at most {most}"
            )
        return (
            Field(each, f"{self.place}[{at}]") for at, each in enumerate(self.value)
        )

    def integers(self, low: int = 0, high: int = MOST_INTEGER) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        return tuple(each.integer(low, high) for each in self.items())

    def fields(
        self, required: Sequence[str], optional: Sequence[str] = ()
    ) -> dict[str, Field]:
        """Return a mapping's fields, all of which are known."""
        found = {key: field for key, field in self.entries()}
        for key in found:
            if key not in required and key not in optional:
                raise MalformedError(
                    f"{self.place}: {visible(repr(key))[:_MOST_SHOWN]} is unknown"
                )
        for key in required:
            if key not in found:
                raise MalformedError(f"{self.place}: {key!r} is missing")
        return found

    def entries(self, most: int = MOST_INTEGER) -> Iterator[tuple[str, Field]]:
        """Yield keys and fields of a mapping."""
        if type(self.value) is not dict or len(self.value) > most:
            raise self.wrong("a mapping")
        if not all(map(_is_writable, self.value)):
            raise self.wrong("a mapping whose keys UTF-8 can write")
        return (
            (key, Field(each, f"{self.place}.{visible(key)[:_MOST_SHOWN]}"))
            for key, each in self.value.items()
        )

    def optional(self, read: Callable[[Field], T]) -> T | None:
        """Return None for null, else what ``read`` makes of it."""
        return None if self.value is None else read(self)
