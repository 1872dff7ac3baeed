# SPDX-License-Identifier: Apache-2.0
"""Signatures say what they need of a communicator: none takes just any object."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMES = {"comm", "channel", "communicator"}


def _untyped(source: ast.AST) -> Iterator[int]:
    """Yield the lines of parameters that are called a communicator, of any type."""
    for node in ast.walk(source):
        if not isinstance(node, ast.arg) or node.arg not in NAMES:
            continue
        if node.annotation and "Any" in ast.unparse(node.annotation):
            yield node.lineno


def test_no_parameter_that_is_a_communicator_is_any() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("commrt", "bench", "tuning")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in _untyped(ast.parse(path.read_text()))
    ]
    assert found == []


def test_such_parameters_are_found() -> None:
    source = "def f(comm: Any, channel: Channel, x: Any) -> None: ..."
    assert [*_untyped(ast.parse(source))] == [1]
