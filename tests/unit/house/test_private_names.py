# SPDX-License-Identifier: Apache-2.0
"""Nobody reaches for a private name of another class: what parts need is public.

A private name belongs to ``self``, ``cls`` or ``super()``. A file may also use it on
another object of a class of its own, where the type is written down beside the object.
Objects of torch have private names that programs must use. They are told by their type,
too: no name is an exception.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed_sources import ROOT, files_of, parsed

ENGINE = "_native"
"""The module of the engine, which is no private name of any other file."""


def is_private(name: str) -> bool:
    """Return whether a name is private to the class or file that defines it."""
    return name.startswith("_") and not name.endswith("__") and name != "_"


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


def types_of(tree: ast.AST) -> dict[str, set[str]]:
    """Return the types that a file writes down for its variables, by their names."""
    types: dict[str, set[str]] = {}

    def note(name: str, written: ast.expr) -> None:
        types.setdefault(name, set()).add(ast.unparse(written).removesuffix(" | None"))

    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            note(node.arg, node.annotation)
        elif isinstance(node, ast.AnnAssign):
            note(ast.unparse(node.target), node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = node.value.func
            if isinstance(made, ast.Attribute) and made.attr == "__new__":
                made = made.value
            for target in node.targets:
                note(ast.unparse(target), made)
    return types


def own_classes(tree: ast.AST) -> dict[str, set[str]]:
    """Return the private names of each class of a file; ``cls`` has those of all."""
    classes = {
        node.name: defined_in(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    return {**classes, "cls": set().union(*classes.values())}


def names_of_torch(tree: ast.AST) -> tuple[str, ...]:
    """Return what a file calls torch, its modules, and what it imports of them."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            inside = getattr(node, "module", "") or ""
            for each in node.names:
                whole = f"{inside}.{each.name}".lstrip(".")
                if whole.split(".")[0] == "torch":
                    names.append((each.asname or each.name).split(".")[0])
    return tuple(names)


def is_reached(node: ast.AST) -> bool:
    """Return whether code is a private name of ours on something but ``self``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr in OURS
        and ast.unparse(node.value) not in ("self", "cls", "super()", "commrt")
    )


def attributes_in(
    tree: ast.AST, types: dict[str, set[str]]
) -> Iterator[tuple[ast.Attribute, set[str]]]:
    """Yield the private names that code uses, and the owner's types as it says them.

    What a function writes down holds there alone.
    """
    for node in ast.iter_child_nodes(tree):
        known = types
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = {**types, **types_of(node)}
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node, known.get(ast.unparse(node.value), set())
        yield from attributes_in(node, known)


def reached_in(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the private names that a file uses on objects other than its own."""
    if not any(map(is_reached, ast.walk(tree))):
        return  # as in most files
    classes, torch = own_classes(tree), names_of_torch(tree)
    for node, written in attributes_in(tree, types_of(tree)):
        if not is_reached(node):
            continue
        is_own = all(node.attr in classes.get(each, ()) for each in written)
        of_torch = all(each.split(".")[0] in torch for each in written)
        if not written or not (is_own or of_torch):
            yield node


def imported_in(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield lines and private names that a file imports from elsewhere in commrt.

    A private module may be imported by the files of its own folder.
    """
    folder = "commrt." + ".".join(Path(name).parent.parts).removeprefix("commrt")
    folder = folder.replace("..", ".").rstrip(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            whole = [each.name for each in node.names]
        else:
            continue
        for each in whole:
            start, *parts = each.split(".")
            private = [part for part in parts if is_private(part) and part != ENGINE]
            is_module = bool(private) and each.startswith(f"{folder}.{private[0]}.")
            if start == "commrt" and private and not is_module:
                yield node.lineno, each


TREES = {
    path.relative_to(ROOT).as_posix(): parsed(path)
    for path in files_of("commrt", "tuning", "bench")
}
STUB = parsed(ROOT / "commrt" / "_native.pyi")
OURS = set().union(*map(defined_in, TREES.values()), defined_in(STUB))


def violations(name: str, tree: ast.AST) -> list[str]:
    """Return the places of a file that reach for private names of other objects."""
    reached = [
        f"{name}:{node.lineno}: {ast.unparse(node)}" for node in reached_in(tree)
    ]
    return reached + [
        f"{name}:{line}: {each}" for line, each in imported_in(name, tree)
    ]


def test_no_file_reaches_for_a_private_name_of_another() -> None:
    found = [line for name, tree in TREES.items() for line in violations(name, tree)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(comm): return comm._check_timeout", ["comm._check_timeout"]),
        ("class A:\n def _check_timeout(self): ...\nx._check_timeout()",
         ["x._check_timeout"]),
        ("class A:\n def _check_timeout(self): ...\nx = B()\nx._check_timeout()",
         ["x._check_timeout"]),
        ("type(group)._check_timeout", ["type(group)._check_timeout"]),
        ("Base._check_timeout(self)", ["Base._check_timeout"]),
        ("from commrt.comm import _made", ["commrt.comm._made"]),
        ("from commrt.algorithms._fold import x", ["commrt.algorithms._fold.x"]),
        ("from commrt import _native\nimport commrt._native", []),
        ("import torch\ndef f(x: torch.Tensor): return x._check_timeout", []),
        ("class A:\n def _check_timeout(self, other: A): other._check_timeout()", []),
    ],
)  # fmt: skip
def test_the_scan_sees_private_names(source: str, found: list[str]) -> None:
    tree = ast.parse(source)
    assert "_check_timeout" in OURS
    said = [line.rpartition(" ")[2] for line in violations("commrt/f.py", tree)]
    assert said == found
