# SPDX-License-Identifier: Apache-2.0
"""A tree of plain values that remembers where each stood, and the limits of a table.

Apart from ``yaml_tree.py``, so that checking code needs no YAML parser: importing
commrt must not pay for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from commrt.errors import TableError

__all__ = ["MAX_DEPTH", "MAX_NBYTES", "Node", "Scalar", "fail"]

MAX_NBYTES = 1_000_000
"""Largest text that is read at all."""
MAX_DEPTH = 16
"""Deepest nesting; the schema needs 7."""

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Node:
    """One value of the text and where it stood."""

    value: Scalar | dict[str, Node] | list[Node]
    """A scalar, or the nodes below."""
    path: str
    """Path of the value, as in ``$.rules[3].match.bytes``."""
    line: int
    """Counted from 1."""
    source: str
    """Name of the file, for messages."""


def fail(node: Node, problem: str) -> TableError:
    """Return the error that says what is wrong with ``node``, and where it stands."""
    return TableError(f"{node.source}, line {node.line}, {node.path}: {problem}")
