# SPDX-License-Identifier: Apache-2.0
"""XML of others: elements one by one, within limits, with lines for messages.

A document type is skipped, never fetched. Documents that declare entities are refused,
since a short one may stand for a very long text ("billion laughs").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from xml.parsers import expat

from commrt.errors import UsageError, shown

__all__ = ["XmlReader"]

_MOST_DEEP = 64

Start = Callable[[str, Mapping[str, str]], None]
"""Takes an element: its tag and its attributes."""


class XmlReader:
    """Reads one document, and knows the line that it is at."""

    def __init__(self, source: str) -> None:
        """Prepare to read.

        Args:
            source: the name of the file, for messages.
        """
        self.source = source
        self.open: list[str] = []
        """Tags of the elements that are open, the outermost first."""
        self._parser = expat.ParserCreate()

    @property
    def line(self) -> int:
        """The line of the element that was begun last, from 1."""
        return self._parser.CurrentLineNumber

    def wrong(self, problem: object, line: int | None = None) -> UsageError:
        """Return the error that says what is wrong on a line: on this one if None."""
        at = self.line if line is None else line
        return UsageError(f"{self.source}, line {at}: {problem}")

    def needed(self, given: Mapping[str, str], key: str) -> str:
        """Return an attribute of the open element, or raise UsageError."""
        if key not in given:
            raise self.wrong(f"{key} is missing in <{self.open[-1]}>")
        return given[key]

    def read(self, text: str, start: Start, end: Callable[[str], None]) -> None:
        """Hand each element of a text to ``start`` and, when it ends, to ``end``.

        Raises:
            UsageError: the text is no XML, declares entities or lies too deep; or what
                the two raised.
        """

        def begin(tag: str, given: Mapping[str, str]) -> None:
            self.open.append(tag)
            if len(self.open) > _MOST_DEEP:
                raise self.wrong(f"elements lie deeper than {_MOST_DEEP}")
            start(tag, given)

        def finish(tag: str) -> None:
            self.open.pop()
            end(tag)

        self._parser.StartElementHandler = begin
        self._parser.EndElementHandler = finish
        self._parser.EntityDeclHandler = self._entity
        try:
            self._parser.Parse(text, True)
        except expat.ExpatError as error:
            problem = expat.errors.messages[error.code]
            raise self.wrong(f"not XML: {problem}", error.lineno) from error

    def _entity(self, name: str, *_: Any) -> None:
        raise self.wrong(
            f"the document declares the entity {shown(name)}; write it out"
        )
