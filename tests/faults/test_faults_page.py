# SPDX-License-Identifier: Apache-2.0
"""docs/faults.md names tests that exist, and all that are here."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "faults.md").read_text()
LABEL = re.compile(r"\[([\w/]+/test_\w+\.py)\](?!:)")
TARGET = re.compile(r"^\[([\w/]+/test_\w+\.py)\]: \.\./tests/(\S+)$", re.MULTILINE)


def test_every_test_that_the_page_names_exists() -> None:
    targets = dict(TARGET.findall(TEXT))
    assert set(LABEL.findall(TEXT)) == set(targets)
    assert [name for name, path in targets.items() if name != path] == []
    assert [name for name in targets if not (ROOT / "tests" / name).exists()] == []


def test_the_page_names_every_fault_test() -> None:
    files = {f"faults/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert files - {f"faults/{Path(__file__).name}"} <= set(LABEL.findall(TEXT))
