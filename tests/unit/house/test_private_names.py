# SPDX-License-Identifier: Apache-2.0
"""Nobody reaches for a private name of another class: what parts need is public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("commrt", "tuning", "bench")
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
)


def is_private(name: str) -> bool:
    """Return whether a name is private to the class or file that defines it."""
    return name.startswith("_") and not name.endswith("__")


def defined_in(tree: ast.AST) -> set[str]:
    """Return the private names that a file defines: of modules, classes, objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return {name for name in found if is_private(name)}


def reached_in(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield what a file reaches for in objects other than its own ``self``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            continue
        is_super = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
        if not is_super and ast.unparse(owner) != "commrt":
            yield node


TREES = {name: ast.parse((ROOT / name).read_text()) for name in FILES}
STUB = ast.parse((ROOT / "commrt" / "_native.pyi").read_text())
DEFINED = {name: defined_in(tree) for name, tree in TREES.items()}
OTHERS = {
    *("_replace", "_fields", "_get_backend", "_end_coalescing", "_values"),
    *("_allgather_base", "_reduce_scatter_base"),
}
"""Names of the standard library and of torch that classes here have, too."""
OURS = set().union(*DEFINED.values(), defined_in(STUB)) - OTHERS


def violations(name: str, tree: ast.AST) -> list[str]:
    """Return the places of a file that reach for private names of other files."""
    own = DEFINED.get(name, set())
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for node in reached_in(tree)
        if node.attr in OURS and node.attr not in own
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_file_reaches_for_no_private_name_of_another(name: str) -> None:
    assert violations(name, TREES[name]) == []


def test_the_scan_sees_a_private_name() -> None:
    tree = ast.parse("def f(comm):\n    return comm._check_timeout('f', 1)\n")
    assert violations("f.py", tree) == ["f.py:2: comm._check_timeout"]
