# SPDX-License-Identifier: Apache-2.0
"""Parts say what they need of each other: none takes just any object for a part.

Parameters and fields are told by their names. ``Any`` and ``object`` say nothing about
a communicator, its services, or a group of another library.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from parsed_sources import ROOT, files_of, parsed

PARTS = (
    *("comm", "channel", "communicator", "group", "world", "bootstrap"),
    *("selection", "policy", "offers", "attached", "surroundings", "beside"),
    *("collectives", "devices", "messages", "comparison", "recorder", "sums"),
)
NAME = re.compile(rf"(^|_)({'|'.join(PARTS)})$")
"""Matches the names of parts: ``comm``, ``_comm``, ``mpi_comm``."""
LOOSE = {"Any", "object", "typing.Any"}


def _declared(source: ast.AST) -> Iterator[tuple[int, str, ast.expr]]:
    """Yield line, name and type of every parameter, variable and field."""
    for node in ast.walk(source):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.lineno, node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            name = ast.unparse(node.target).rpartition(".")[2]
            yield node.lineno, name, node.annotation


def _united(written: ast.expr) -> Iterator[str]:
    """Yield the types that a value may have: those of ``A | B``, and A of Optional."""
    if isinstance(written, ast.BinOp):
        yield from _united(written.left)
        yield from _united(written.right)
    elif isinstance(written, ast.Constant) and isinstance(written.value, str):
        yield from _united(ast.parse(written.value, mode="eval").body)
    elif isinstance(written, ast.Subscript):
        outer = ast.unparse(written.value).rpartition(".")[2]
        if outer in ("Optional", "Union", "ClassVar", "Final", "ref", "ReferenceType"):
            parts = written.slice
            each = parts.elts if isinstance(parts, ast.Tuple) else [parts]
            for one in each:
                yield from _united(one)
    else:
        yield ast.unparse(written)


def _untyped(source: ast.AST) -> list[int]:
    """Return the lines that declare a part as any object."""
    return [
        line
        for line, name, written in _declared(source)
        if NAME.search(name) and LOOSE & {*_united(written)}
    ]


def test_no_part_is_just_any_object() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files_of("commrt", "bench", "tuning")
        for line in _untyped(parsed(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(comm: Any, channel: Channel, x: Any) -> None: ...",
        "def f(group: object | None) -> None: ...",
        "def f(*, native_comm: 'Any' = None) -> None: ...",
        "class A:\n messages: Any",
        "self._comm: weakref.ref[Any] = comm",
        "devices: Optional[Any] = None",
    ],
)
def test_such_declarations_are_found(source: str) -> None:
    assert len(_untyped(ast.parse(source))) == 1


def test_types_and_containers_are_not_found() -> None:
    source = "def f(comm: Channel, world: World | None, messages: list[Any]): ..."
    assert _untyped(ast.parse(source)) == []
