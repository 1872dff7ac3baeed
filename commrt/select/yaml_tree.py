# SPDX-License-Identifier: Apache-2.0
"""YAML for data only: text to a tree that remembers where each value stood.

The subset is what a table needs: mappings, lists, strings, integers, numbers, true,
false, null. Anchors, aliases, tags, merge keys, duplicate keys and second documents are
refused, and size and depth are capped, so that a hostile file costs milliseconds and no
memory. Scalars follow YAML 1.2's core rules: ``on``, ``yes`` and ``1:30`` are strings,
dates are strings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from commrt.errors import TableError
from commrt.select.tree import MAX_DEPTH, MAX_NBYTES, Node, Scalar, fail

__all__ = ["is_plain_text", "read_tree"]

_MAX_INT = 2**63 - 1
_TOO_DEEP = "nested too deeply to be a table; name a file that commrt-tune wrote"

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_tree(text: str, source: str) -> Node:
    """Return the one document in ``text``; TableError for anything outside the subset.

    Args:
        text: YAML.
        source: name of the file, for messages.
    """
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise TableError(
            f"{source}: not Unicode text: {error}; save it as UTF-8"
        ) from error
    if nbytes > MAX_NBYTES:
        raise TableError(
            f"{source}: {nbytes} bytes is larger than any selection table "
            f"(limit {MAX_NBYTES}): name a file that commrt-tune wrote"
        )
    try:
        return _Reader(source, yaml.parse(text, Loader=_LOADER)).document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        if "nesting depth" in problem:  # PyYAML's own limit, from 6.0.4 on
            raise TableError(f"{source}{where}: {_TOO_DEEP}") from error
        raise TableError(f"{source}{where}: not YAML: {problem}") from error
    except RecursionError as error:
        raise TableError(f"{source}: {_TOO_DEEP}") from error


class _Reader:
    """Builds nodes from the parser's events; recursion is bounded by MAX_DEPTH."""

    def __init__(self, source: str, events: Iterator[Any]) -> None:
        self._source = source
        self._events = events

    def document(self) -> Node:
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise TableError(
                f"{self._source}: the file is empty; expected a selection table, as "
                f"commrt-tune run writes it"
            )
        root = self._value(next(self._events), "$", 1)
        next(self._events)
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            line = after.start_mark.line + 1
            raise TableError(
                f"{self._source}, line {line}: a second document begins here; a file "
                f"holds one table, so delete the rest"
            )
        return root

    def _value(self, event: Any, path: str, depth: int) -> Node:
        here = self._empty(event, path)
        line = here.line
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise fail(
                here,
                "anchors (&) and aliases (*) are not allowed in a table; write the "
                "value out",
            )
        if event.tag is not None:
            raise fail(
                here, f"tags are not allowed in a table: {event.tag}; leave it out"
            )
        if isinstance(event, yaml.ScalarEvent):
            plain = event.implicit[0]
            value = _resolve(event.value, here) if plain else event.value
            return Node(value, path, line, self._source)
        if depth >= MAX_DEPTH:
            raise fail(here, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.MappingStartEvent):
            return Node(self._mapping(path, depth), path, line, self._source)
        return Node(self._sequence(path, depth), path, line, self._source)

    def _empty(self, event: Any, path: str) -> Node:
        return Node(None, path, event.start_mark.line + 1, self._source)

    def _mapping(self, path: str, depth: int) -> dict[str, Node]:
        children: dict[str, Node] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                here = self._empty(event, path)
                raise fail(
                    here, "keys are names, not mappings or lists; write a name here"
                )
            key = self._value(event, path, depth)
            if not isinstance(key.value, str):
                raise fail(key, f"keys are names, not {key.value!r}: quote it")
            if key.value in children:
                raise fail(key, f"key {key.value!r} is given twice; keep one")
            child = f"{path}.{_short(key.value)}"
            children[key.value] = self._value(next(self._events), child, depth + 1)
        return children

    def _sequence(self, path: str, depth: int) -> list[Node]:
        children: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            child = f"{path}[{len(children)}]"
            children.append(self._value(event, child, depth + 1))
        return children


def is_plain_text(text: str) -> bool:
    """Return whether ``text`` written without quotes reads back as itself."""
    numeric = (_INT, _FLOAT, _NOT_FINITE)
    special = text in _WORDS or text == "<<"
    return not special and not any(form.fullmatch(text) for form in numeric)


def _short(key: str) -> str:
    """Return a key as a path shows it: quoted and cut where it is no plain name."""
    return key if key.isidentifier() and len(key) <= 40 else repr(key[:40])


def _resolve(text: str, here: Node) -> Scalar:
    """Return the value of a plain scalar; numbers outside the bounds are refused."""
    if text in _WORDS:
        return _WORDS[text]
    if text == "<<":
        raise fail(
            here, "merge keys (<<) are not allowed in a table; write the keys out"
        )
    if _INT.fullmatch(text):
        # The length test comes first: int() of a megabyte of digits takes seconds.
        if len(text) > 20 or not -_MAX_INT <= int(text) <= _MAX_INT:
            raise fail(
                here,
                f"integer {text[:24]} does not fit into 63 bits; expected at most "
                f"{_MAX_INT}",
            )
        return int(text)
    if _NOT_FINITE.fullmatch(text):
        raise fail(here, f"{text} is not a finite number; write null for no limit")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise fail(
                here,
                f"{text[:24]} is not a finite number; write null for no limit",
            )
        return number
    return text
