# SPDX-License-Identifier: Apache-2.0
"""Code asks facts of operations and backends, and does not compare their names.

A comparison such as ``name == "alltoallv"`` is a place that a new operation or backend
has to find. The facts of an operation stand in ``vocabulary/operations.py``, those of a
backend in its own folder. Tables that translate names, such as torch's, are no
comparisons. The benchmarks and the tuner ask the table of operations, too. They do name
backends: they measure libraries, and export to them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed_sources import ROOT, files_of, parsed

import commrt
from commrt import backends
from commrt.vocabulary.operations import ROWS

PACKAGE = Path(commrt.__file__).parent
PROGRAMS = ("bench", "tuning")
PEERS = "bench/peer_*.py"
"""Translators of peers: each calls another library's function for an operation."""
OPERATIONS = frozenset(row.name for row in ROWS)
BACKENDS = frozenset(
    name
    for name, each in backends.all_backends().items()
    if type(each).__module__.startswith("commrt.backends.")
)
SHORTEST = min(map(len, OPERATIONS))
KIND = "kind"
"""A comparison of something called ``kind`` is of another thing whose kinds have words
of their own: launchers (``mpi``), and steps of a schedule (``reduce``)."""
CHOOSE = (
    *("select", "planning", "group", "calls", "device_calls"),
    *("boxes", "grids", "fusion", "sparse", "compression"),
)
"""Parts in which no backend's name stands at all: what selects, plans, and gets calls
to devices."""
FORMAT = PACKAGE / "select" / "schema.py"
"""The format of selection tables, which is fixed: it has backends' names as words."""


def _modules(*parts: str) -> Iterator[Path]:
    for part in parts:
        yield from sorted((PACKAGE / part).rglob("*.py"))


def _texts(node: ast.AST | None) -> set[str]:
    """Return the strings of an operand: itself, or those of a tuple, list or set."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return set().union(*map(_texts, node.elts))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return set()


def _is_kind(node: ast.AST) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    return bool(name == KIND)


def _asked_part(node: ast.Call) -> set[str]:
    """Return the names that begin, or end, with what a call asks of a string."""
    asks = getattr(node.func, "attr", "")
    if asks not in ("startswith", "endswith"):
        return set()
    texts = tuple(set().union(*map(_texts, node.args)))
    every = OPERATIONS | BACKENDS
    return {name for name in every if getattr(name, asks)(texts)}


def _contained(node: ast.Compare) -> set[str]:
    """Return the operations that have, as a part, the word that is looked for."""
    if not isinstance(node.ops[0], ast.In | ast.NotIn):
        return set()
    words = [text for text in _texts(node.left) if len(text) >= SHORTEST]
    return {name for name in OPERATIONS for word in words if word in name}


def _compared(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Yield lines and the strings that they compare something with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if not any(map(_is_kind, operands)):
                texts = set().union(*map(_texts, operands))
                yield node.lineno, texts | _contained(node)
        elif isinstance(node, ast.MatchValue):
            yield node.lineno, _texts(node.value)
        elif isinstance(node, ast.Call):
            yield node.lineno, _asked_part(node)


def _found(path: Path, names: frozenset[str]) -> list[str]:
    lines = path.read_text().splitlines()
    return [
        f"{path}:{line}: {lines[line - 1].strip()}"
        for line, texts in _compared(parsed(path))
        if texts & names
    ]


def _own_backend(path: Path) -> frozenset[str]:
    """Return the names that a file of a backend may compare: its own."""
    return frozenset({path.parent.name, path.stem})


@pytest.mark.parametrize("name", ["ring == 'allreduce'", "x in ('nccl', 'a')"])
def test_comparisons_are_found(name: str) -> None:
    [(_, texts)] = _compared(ast.parse(name))
    assert texts & (OPERATIONS | BACKENDS)


def test_prefixes_and_cases_are_found() -> None:
    [(_, texts)] = _compared(ast.parse("name.startswith('neighbor_allgather')"))
    assert texts == {"neighbor_allgather", "neighbor_allgatherv"}
    [(_, texts)] = _compared(ast.parse("name.endswith('toallv')"))
    assert texts == {"alltoallv", "neighbor_alltoallv"}
    [(_, texts)] = _compared(ast.parse("'allgatherv' in name"))
    assert texts == {"allgatherv", "neighbor_allgatherv"}
    match = "match name:\n  case 'bcast':\n    pass"
    assert [(2, {"bcast"})] == list(_compared(ast.parse(match)))
    assert not list(_compared(ast.parse("launch.kind == 'mpi'")))


def test_no_operation_is_compared_by_name() -> None:
    peers = {*ROOT.glob(PEERS)}
    files = [each for each in files_of("commrt", *PROGRAMS) if each not in peers]
    assert [line for path in files for line in _found(path, OPERATIONS)] == []


def test_no_backend_is_compared_by_name() -> None:
    found = [
        line
        for path in _modules("")
        for line in _found(path, BACKENDS - _own_backend(path))
    ]
    assert found == []


def test_nothing_that_chooses_has_a_backends_name() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in _modules(*CHOOSE)
        if path != FORMAT
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and node.value in BACKENDS
    ]
    assert found == []
