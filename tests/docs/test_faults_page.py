# SPDX-License-Identifier: Apache-2.0
"""The pages on faults name tests that exist, and all of ``tests/faults``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole
ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("faults*.md"))
LABEL = re.compile(r"\[([\w/]+/test_\w+\.py)\](?!:)")
TARGET = re.compile(r"^\[([\w/]+/test_\w+\.py)\]: \.\./tests/(\S+)$", re.MULTILINE)
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
WITHOUT_A_PROMISE = (
    # The page describes such calls, and promises nothing of them.
    "| a message (`send`, `recv`, ...) | nothing:",
    "| operations on one communicator that differ |",
)


def named(page: Path) -> set[str]:
    return set(LABEL.findall(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    targets = dict(TARGET.findall(page.read_text()))
    assert named(page) == set(targets)
    assert list(targets) == sorted(targets)
    assert [name for name, path in targets.items() if name != path] == []
    assert [name for name in targets if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_promise_has_a_test_beside_it(page: Path) -> None:
    """In tables whose head has a column for it."""
    tables = re.split(r"\n\n", page.read_text())
    rows = [
        row
        for table in tables
        if re.match(r"\|.*\| test \|$", table, re.MULTILINE)
        for row in ROW.findall(table)[2:]
    ]
    assert len(rows) > 5
    alone = [row for row in rows if not LABEL.search(row)]
    assert [row for row in alone if not row.startswith(WITHOUT_A_PROMISE)] == []


def test_the_pages_name_every_fault_test() -> None:
    here = (ROOT / "tests" / "faults").glob("test_*.py")
    files = {f"faults/{path.name}" for path in here}
    assert len(files) > 10
    assert files <= set().union(*map(named, PAGES))
