# SPDX-License-Identifier: Apache-2.0
"""Pages are consistent: links lead somewhere, tables are current, README is short."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from doc_blocks import ROOT, all_pages

import commrt.errors

pytestmark = pytest.mark.whole
PAGES = sorted({*all_pages(), *(path.name for path in ROOT.glob("*.md"))})
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
MARKED = re.compile(r'<a id="([^"]+)">')
NAMED = re.compile(r"\bdocs/[\w/-]+\.md\b")
SOURCES = ("commrt", "tuning", "bench", "tests", "tables", "Makefile", "pyproject.toml")
SUFFIXES = {"", ".py", ".pyi", ".cpp", ".hpp", ".toml", ".txt", ".yaml", ".md"}


def _reference_tables() -> ModuleType:
    path = ROOT / "docs" / "reference_tables.py"
    spec = importlib.util.spec_from_file_location("reference_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return FENCED.sub("", page.read_text())


def _anchors(page: Path) -> set[str]:
    """Return what links may name behind ``#``, by the rules of GitHub."""
    text = _prose(page)
    found = set(MARKED.findall(text))
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def _leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    other = page.parent / path if path else page
    if not anchor:
        return other.exists()
    return other.is_file() and anchor in _anchors(other)


def test_generated_tables_are_current() -> None:
    tables = _reference_tables()
    for path, wanted in tables.PAGES.items():
        page = path.read_text()
        renewed = tables.fill(page, wanted)
        assert page == renewed, "run: python docs/reference_tables.py"


def test_a_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no place"):
        _reference_tables().fill("# nothing generated here\n")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_page_and_a_place_on_it(page: str) -> None:
    path = ROOT / page
    targets = [
        target
        for target in LINK.findall(_prose(path))
        if not target.startswith(("http://", "https://"))
    ]
    assert [name for name in targets if not _leads_somewhere(path, name)] == []


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `comm.fused(*, x=1)`, *now*\n## A [link](b.md)\n## A link\n"
        '<a id="here"></a>\n```sh\n# no heading\n```\n'
    )
    assert _anchors(page) == {"commfused-x1-now", "a-link", "a-link-1", "here"}
    assert _leads_somewhere(page, "#here")
    assert _leads_somewhere(page, "page.md#a-link-1")
    assert not _leads_somewhere(page, "page.md#no-heading")
    assert not _leads_somewhere(page, "other.md")


def test_pages_that_sources_name_exist() -> None:
    missing = []
    for name in SOURCES:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES:
                found = NAMED.findall(path.read_text())
                missing += [
                    (path, page) for page in found if not (ROOT / page).exists()
                ]
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / name).resolve() for name in LINK.findall(_prose(index))}
    pages = [
        page for page in all_pages() if page not in ("README.md", "docs/README.md")
    ]
    assert [page for page in pages if (ROOT / page).resolve() not in listed] == []


def test_readme_has_at_most_120_lines() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 120


def test_every_error_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    errors = [
        name for name in commrt.errors.__all__ if name not in ("shown", "suggest")
    ]
    assert [name for name in errors if f"{name}`" not in text] == []
