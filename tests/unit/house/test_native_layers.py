# SPDX-License-Identifier: Apache-2.0
"""C++ files include files of lower layers only, and name no type of a higher one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "commrt" / "native"

# Lowest first. A part is a folder, or a file beside the folders. Parts of one layer
# may include each other, but not in a circle.
LAYERS = (
    ("types", "planted_bugs", "gil", "python_callbacks"),
    ("kernels", "recording", "nccl", "schedules"),
    ("devices", "sim"),
    ("engine", "arrays"),
    ("device_calls",),
    ("staging", "peer_memory", "library_calls"),
    ("calls",),
    ("bindings",),
)
LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}
MOST_PARTS = 10

COMMENT = re.compile(r"//.*")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
# A type that is named and not defined: `class Comm;`, or `class Comm*` in another one.
NAMED = re.compile(r"\b(?:class|struct)\s+(\w+)\s*[;*&]")
DEFINED = re.compile(r"^\s*(?:class|struct)\s+(\w+)[^;{}()]*\{", re.MULTILINE)

Sources = Mapping[str, str]
"""The text of C++ files by their path below the engine's folder."""


def _part(name: str) -> str:
    return name.split("/")[0].split(".")[0]


def _read(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): COMMENT.sub("", path.read_text())
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".cpp", ".hpp")
    }


def _edges(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield every file with every file of the engine that it includes."""
    for name, text in sources.items():
        for target in INCLUDE.findall(text):
            yield name, target


def _violations(sources: Sources) -> list[str]:
    """Return a sentence for each part without a layer, and each arrow that goes up."""
    unknown = {_part(name) for name in sources} - set(LEVELS)
    found = [f"{part} has no layer: give it one in LAYERS" for part in sorted(unknown)]
    levels = {**dict.fromkeys(unknown, -1), **LEVELS}
    for name, target in _edges(sources):
        if target not in sources:
            found.append(
                f"{name} includes {target}, which is no file from the top folder"
            )
        elif levels[_part(target)] > levels[_part(name)]:
            found.append(f"{name} includes {target}, which is above it")
    homes: dict[str, set[str]] = {}
    for name, text in sources.items():
        for defined in DEFINED.findall(text):
            homes.setdefault(defined, set()).add(_part(name))
    for name, text in sources.items():
        own = levels[_part(name)]
        for named in NAMED.findall(text):
            if min((levels[home] for home in homes.get(named, ())), default=own) > own:
                found.append(f"{name} names {named}, which is above it")
    return found


def _circles(sources: Sources) -> list[str]:
    """Return the parts that include themselves by way of other parts."""
    edges: dict[str, set[str]] = {}
    for name, target in _edges(sources):
        if _part(name) != _part(target):
            edges.setdefault(_part(name), set()).add(_part(target))

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    return [part for part in sorted(edges) if part in reachable(part)]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return _read(NATIVE)


def test_the_scan_finds_the_engine_and_every_layer(sources: Sources) -> None:
    assert {_part(name) for name in sources} == set(LEVELS)
    assert len(list(_edges(sources))) > 300


def test_includes_go_down_only(sources: Sources) -> None:
    assert _violations(sources) == []


def test_parts_do_not_include_each_other_in_a_circle(sources: Sources) -> None:
    assert _circles(sources) == []


def test_layers_are_small_and_name_each_part_once() -> None:
    assert max(len(parts) for parts in LAYERS) <= MOST_PARTS
    assert len(LEVELS) == sum(len(parts) for parts in LAYERS)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "engine/planted.hpp",
            '#pragma once\n  #  include "calls/group.hpp"\n',
            "engine/planted.hpp includes calls/group.hpp, which is above it",
        ),
        (
            "engine/planted.hpp",
            "std::vector<class Group*> all;",
            "engine/planted.hpp names Group, which is above it",
        ),
        (
            "new_folder/planted.hpp",
            "",
            "new_folder has no layer: give it one in LAYERS",
        ),
        (
            "engine/planted.cpp",
            '#include "../calls/group.hpp"',
            "engine/planted.cpp includes ../calls/group.hpp, which is no file from the "
            "top folder",
        ),
    ],
)
def test_the_scan_sees_a_planted_violation(
    sources: Sources, name: str, text: str, said: str
) -> None:
    assert _violations({**sources, name: text}) == [said]


def test_the_scan_sees_a_planted_circle_within_a_layer(sources: Sources) -> None:
    there = {**sources, "staging/a.hpp": '#include "peer_memory/peer_work.hpp"'}
    assert (_violations(there), _circles(there)) == ([], [])
    back = {**there, "peer_memory/b.hpp": '#include "staging/a.hpp"'}
    assert _violations(back) == []
    assert _circles(back) == ["peer_memory", "staging"]


def test_the_scan_leaves_comments_out(tmp_path: Path) -> None:
    (tmp_path / "a.hpp").write_text(
        '// #include "calls/group.hpp"\nint a;  // class X;\n'
    )
    assert _read(tmp_path) == {"a.hpp": "\nint a;  \n"}
