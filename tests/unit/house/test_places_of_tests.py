# SPDX-License-Identifier: Apache-2.0
"""Tests lie where docs/testing.md says, in folders named for the package's parts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
PARTS = {
    path.relative_to(folder).parts[0]
    for folder in (ROOT / "commrt", ROOT / "commrt" / "native")
    for path in folder.glob("*/*.*")
} | {"tuning", "bench"}
OTHERS = {"unit": {"house", "package", "gpu_libraries"}, "ranks": set()}
"""Folders that are not named for a part of the package."""


def found_in(folder: Path) -> list[Path]:
    """Return the Python files below a folder."""
    return [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]


@pytest.mark.parametrize("kind", OTHERS)
def test_each_folder_is_named_for_a_part_of_the_package(kind: str) -> None:
    places = {path.relative_to(TESTS / kind).parts for path in found_in(TESTS / kind)}
    assert {len(place) for place in places} == {2}, "one folder, then the file"
    assert {place[0] for place in places} - OTHERS[kind] <= PARTS


def test_no_two_files_share_a_name() -> None:
    names = Counter(path.name for path in found_in(TESTS))
    assert [name for name, times in names.items() if times > 1] == ["conftest.py"]


def test_helpers_are_in_support_and_tests_are_not() -> None:
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]
    for kind in OTHERS:
        names = {path.name for path in found_in(TESTS / kind)} - {"conftest.py"}
        assert all(name.startswith("test_") for name in names)
    assert not [p for p in found_in(TESTS / "support") if p.name.startswith("test_")]
