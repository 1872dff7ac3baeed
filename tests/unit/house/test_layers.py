# SPDX-License-Identifier: Apache-2.0
"""Imports go down only, as the layers in docs/design.md say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Lowest first; modules of one layer may import each other, but not in a circle.
LAYERS = (
    ("errors", "env", "called_by_engine", "version", "vocabulary"),
    ("_native",),
    ("mpi", "launch", "bootstrap", "gloo", "kernels", "devices", "nccl", "arrays"),
    ("schedule",),
    ("algorithms", "select"),
    ("planning", "job"),
    ("group", "request"),
    ("backends", "trace"),
    ("calls",),
    ("device_calls",),
    ("messages", "boxes", "sparse", "fusion", "compression"),
    ("plans",),
    ("grids",),
    ("subgroups", "comm", "runtime", "local", "commrt"),
    ("torch",),
    ("layers",),
    ("tuning", "bench", "commands", "examples", "tables", "run", "__main__"),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

# Folders beside commrt/ that install as part of it.
FOLDERS = {ROOT / "commrt": "commrt", ROOT / "tuning": "commrt.tuning"}
FOLDERS[ROOT / "bench"] = "commrt.bench"


def _sources() -> dict[str, Path]:
    """Return every Python file of the package by module name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


SOURCES = _sources()


def _part(module: str) -> str:
    """Return the part of the package that a module belongs to."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "commrt"


def _imports(path: Path) -> Iterator[str]:
    """Yield every module of the package that a file imports, anywhere in it.

    Imports for type checkers only do not count: they never run.
    """
    for node in _running_code(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "commrt":
                yield _module(name)


def _running_code(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        test = child.test if isinstance(child, ast.If) else None
        if not (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"):
            yield from _running_code(child)


def _module(name: str) -> str:
    """Cut an imported object's name off: ``commrt.env.read`` is in ``commrt.env``."""
    if name in SOURCES or name == "commrt._native":
        return name
    parent = name.rpartition(".")[0]
    return _module(parent) if parent else name


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_go_down_only(module: str) -> None:
    part = _part(module)
    assert part in LEVELS, f"give {part} a layer, here and in docs/design.md"
    upward = [
        target
        for target in _imports(SOURCES[module])
        if LEVELS.get(_part(target), -1) > LEVELS[part]
    ]
    assert upward == []


def test_parts_do_not_import_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for module, path in SOURCES.items():
        targets = {_part(target) for target in _imports(path)}
        edges.setdefault(_part(module), set()).update(targets)
    for part in edges:
        edges[part].discard(part)
    # `import commrt` asks for the public interface, which knows all that is below it.
    assert [part for part in sorted(_in_circles(edges)) if part != "commrt"] == []


def _in_circles(edges: dict[str, set[str]]) -> set[str]:
    """Return what can be reached from itself."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for target in edges.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    return {each for each in edges if each in reachable(each)}


def test_no_layer_has_more_than_ten_parts() -> None:
    assert [names for names in LAYERS if len(names) > 10] == []


def test_files_do_not_import_in_a_circle() -> None:
    edges = {module: {*_imports(path)} for module, path in SOURCES.items()}
    assert _in_circles(edges) - {"commrt"} == set()


def test_the_scan_sees_imports_inside_functions() -> None:
    assert "commrt.commands.verify" in {*_imports(ROOT / "commrt/__main__.py")}
