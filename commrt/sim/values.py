# SPDX-License-Identifier: Apache-2.0
"""Descriptions as values that know where they stood: from YAML, or from a command line.

YAML here is data only. Anchors, aliases, tags and second documents are refused, and so
are long or deep texts: a hostile file costs milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from commrt.errors import UsageError, shown, suggest

__all__ = ["Value", "from_inline", "from_yaml"]

_TAGS = {"str", "int", "float", "bool", "null", "timestamp", "seq", "map"}
_MOST_DEEP = 12
_MOST_VALUES = 400_000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Value:
    """A text, or values by name or in a list, and where it stood."""

    data: str | Mapping[str, Value] | list[Value]
    place: str
    """As in ``net.yaml, line 3, links[0].rate``."""

    def wrong(self, problem: object) -> UsageError:
        """Return the error that says what is wrong here."""
        return UsageError(f"{self.place}: {problem}")

    def mapping(self, known: Iterable[str], needed: Iterable[str]) -> dict[str, Value]:
        """Return the values by name; UsageError for unknown or missing ones."""
        if not isinstance(self.data, Mapping):
            raise self.wrong(f"expected a mapping with {', '.join(known)}")
        for key, value in self.data.items():
            if key not in known:
                raise value.wrong(f"unknown key {shown(key)}{suggest(key, known)}")
        for key in needed:
            if key not in self.data:
                raise self.wrong(f"{key} is missing; add it")
        return dict(self.data)

    def items(self) -> list[Value]:
        """Return the values of a list; a lone value is a list of one."""
        if isinstance(self.data, list):
            return self.data
        if isinstance(self.data, str):
            return [Value(part, self.place) for part in self.data.split("x")]
        return [self]

    def text(self) -> str:
        """Return a scalar."""
        if not isinstance(self.data, str):
            raise self.wrong("expected one value, not a mapping or a list")
        return self.data

    def integer(self) -> int:
        """Return a whole number."""
        text = self.text()
        if not re.fullmatch(r"[-+]?\d{1,18}", text):
            raise self.wrong(f"{shown(text)} is no whole number")
        return int(text)

    def number(self) -> float:
        """Return a number."""
        try:
            return float(self.text())
        except ValueError:
            raise self.wrong(f"{shown(self.data)} is no number") from None

    def flag(self) -> bool:
        """Return true or false."""
        text = self.text()
        if text not in ("true", "false"):
            raise self.wrong(f"{shown(text)}: expected true or false")
        return text == "true"


def from_yaml(text: str, source: str, expected: str = "a network's kind") -> Value:
    """Return the one document of a text, or raise UsageError with the line.

    Args:
        text: YAML.
        source: name of the file, for messages.
        expected: what an empty file lacks.
    """
    try:
        loader = _LOADER(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{source}{where}: not YAML: {problem}") from error
    if root is None:
        raise UsageError(f"{source}: the file is empty; expected {expected}")
    return _Reader(source).value(root, "", 1)


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._seen: set[int] = set()

    def value(self, node: Any, path: str, depth: int) -> Value:
        line = node.start_mark.line + 1
        place = f"{self._source}, line {line}{f', {path}' if path else ''}"
        here = Value("", place)
        # An alias is the same node again.
        if id(node) in self._seen:
            raise here.wrong("aliases (*) are not allowed; write the value out")
        self._seen.add(id(node))
        if depth > _MOST_DEEP or len(self._seen) > _MOST_VALUES:
            raise here.wrong("more values, or deeper ones, than any such file needs")
        if node.tag.rpartition(":")[2] not in _TAGS:
            raise here.wrong(f"tags are not allowed: {node.tag}; leave it out")
        if isinstance(node, yaml.ScalarNode):
            return Value(str(node.value), place)
        if isinstance(node, yaml.SequenceNode):
            parts = enumerate(node.value)
            return Value(
                [self.value(one, f"{path}[{i}]", depth + 1) for i, one in parts], place
            )
        found: dict[str, Value] = {}
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise here.wrong("keys are names, not mappings or lists")
            name = str(key.value)
            if name in found:
                raise here.wrong(f"key {shown(name)} is given twice; keep one")
            found[name] = self.value(child, f"{path}.{name}".lstrip("."), depth + 1)
        return Value(found, place)


def from_inline(text: str, source: str) -> Value:
    """Return ``torus:dims=4x4,rate=100gbit`` as a mapping with the key ``kind``."""
    kind, _, rest = text.partition(":")
    found = {"kind": Value(kind, source)}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        place = f"{source} {text!r}, {name}"
        if not equals or name in found:
            raise UsageError(
                f"{source} {text!r}: {shown(part)}: expected each name once, as in "
                f"star:hosts=8,rate=100gbit,latency=1us"
            )
        found[name] = Value(value, place)
    return Value(found, f"{source} {text!r}")
