# SPDX-License-Identifier: Apache-2.0
"""Imports go down only, as the layers in docs/design.md say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from parsed_sources import ROOT, parsed

# Lowest first; modules of one layer may import each other, but not in a circle.
LAYERS = (
    ("errors", "env", "files", "called_by_engine", "version", "vocabulary"),
    ("_native",),
    (
        *("mpi", "launch", "bootstrap", "gloo", "tcp"),
        *("kernels", "devices", "nccl", "arrays"),
    ),
    ("schedule",),
    ("algorithms", "select", "msccl"),
    ("planning", "job"),
    ("group", "request"),
    ("backends", "trace"),
    ("calls",),
    ("device_calls",),
    ("messages", "objects", "boxes", "sparse", "fusion", "compression"),
    ("plans",),
    ("grids",),
    ("founding", "recovery", "membership", "growing_by_mpi", "growing"),
    (
        "subgroups",
        "core",
        "comm",
        "runtime",
        "local",
        "commrt",
    ),
    ("torch",),
    ("layers", "elastic", "science"),
    ("hvd",),
    ("commands", "run", "running"),
    ("cluster",),
    ("tuning", "bench", "examples", "tables", "sim", "oracle", "__main__"),
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

    Imports inside functions and those for type checkers count: a type that a signature
    names is a part that its reader must know.
    """
    yield from _imports_in(ast.walk(parsed(path)))


def _imports_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "commrt":
                yield _module(name)


def _module(name: str) -> str:
    """Cut an imported object's name off: ``commrt.env.read`` is in ``commrt.env``."""
    if name in SOURCES or name == "commrt._native":
        return name
    parent = name.rpartition(".")[0]
    return _module(parent) if parent else name


EDGES = {module: {*_imports(path)} for module, path in SOURCES.items()}


def test_every_part_has_a_layer() -> None:
    """Give a new part a layer, here and in docs/design.md."""
    assert {*map(_part, SOURCES)} - {*LEVELS} == set()


def test_imports_go_down_only() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in sorted(EDGES.items())
        for target in sorted(targets)
        if LEVELS.get(_part(target), -1) > LEVELS[_part(module)]
    ]
    assert upward == []


def test_parts_do_not_import_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for module, targets in EDGES.items():
        part = _part(module)
        edges.setdefault(part, set()).update({*map(_part, targets)} - {part})
    # `import commrt` asks for the public interface, which knows all that is below it.
    assert [circle for circle in _circles(edges) if circle != {"commrt"}] == []


def test_circles_inside_a_part_have_three_files_at_most() -> None:
    for circle in _circles(EDGES):
        assert len(circle) <= 3, circle
        assert len({*map(_part, circle)}) == 1, circle


def test_files_do_not_import_in_a_circle_when_they_run() -> None:
    edges = {module: {*_running_imports(path)} for module, path in SOURCES.items()}
    assert [circle for circle in _circles(edges) if circle != {"commrt"}] == []


def _running_imports(path: Path) -> Iterator[str]:
    """Yield what a file imports when it runs: all but what type checkers read."""
    yield from _imports_in(_running(parsed(path)))


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    yield tree
    skipped: list[ast.stmt] = []
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        skipped = tree.body
    for node in ast.iter_child_nodes(tree):
        if node not in skipped and not isinstance(node, ast.expr):
            yield from _running(node)


def _circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of nodes that reach each other, or themselves."""
    reached = {each: _reachable(edges, each) for each in edges}
    found: list[set[str]] = []
    for each, targets in reached.items():
        if each in targets and not any(each in circle for circle in found):
            found.append({one for one in targets if each in reached.get(one, ())})
    return found


def _reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in edges.get(todo.pop(), ()):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def _written(page: str) -> list[set[str]]:
    """Return the parts of each layer as the page lists them, from the top."""
    rows = page.split("\n## Layers\n")[1].split("\n\n")[1].splitlines()
    cells = [row.split("|")[1] for row in rows]
    assert cells[0].strip() == "layer"
    return [{*re.findall(r"`(\w+)`", cell)} for cell in cells[2:]]


def test_the_page_lists_the_same_layers() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    assert _written(page) == [{*names} for names in reversed(LAYERS)]


def test_no_layer_names_a_part_that_is_gone() -> None:
    """``_native`` is built, and ``tables`` are files of data."""
    data = {"_native", "tables"}
    assert {*LEVELS} - {*map(_part, SOURCES)} - data == set()


def test_no_layer_has_more_than_ten_parts() -> None:
    assert [names for names in LAYERS if len(names) > 10] == []


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "d"}, "e": {"d"}}
    assert sorted(map(sorted, _circles(edges))) == [["a", "b", "c"], ["d"]]


def test_the_scan_sees_imports_inside_functions() -> None:
    assert "commrt.commands.verify" in {*_imports(ROOT / "commrt/__main__.py")}


def test_the_scan_sees_imports_for_type_checkers(tmp_path: Path) -> None:
    path = tmp_path / "typed.py"
    path.write_text("if TYPE_CHECKING:\n    from commrt.comm import Communicator\n")
    assert [*_imports(path)] == ["commrt.comm"]
    assert [*_running_imports(path)] == []
