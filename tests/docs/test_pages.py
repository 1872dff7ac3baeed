# SPDX-License-Identifier: Apache-2.0
"""Pages are consistent: links lead somewhere, tables are current, README is short."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import commrt.errors

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")


def _reference_tables() -> ModuleType:
    path = ROOT / "docs" / "reference_tables.py"
    spec = importlib.util.spec_from_file_location("reference_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_current() -> None:
    tables = _reference_tables()
    for path, wanted in tables.PAGES.items():
        page = path.read_text()
        renewed = tables.fill(page, wanted)
        assert page == renewed, "run: python docs/reference_tables.py"


def test_a_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no place"):
        _reference_tables().fill("# nothing generated here\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = [
        target
        for target in LINK.findall(page.read_text())
        if not target.startswith(("http://", "https://"))
    ]
    assert [name for name in targets if not (page.parent / name).exists()] == []


def test_readme_has_at_most_150_lines() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 150


def test_every_error_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    errors = [name for name in commrt.errors.__all__ if name != "suggest"]
    assert [name for name in errors if f"{name}`" not in text] == []
