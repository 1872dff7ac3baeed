# SPDX-License-Identifier: Apache-2.0
"""House rules that no linter checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("commrt", "tuning", "bench", "tests", "docs")
SUFFIXES = {".py", ".cpp", ".hpp", ".cuh"}
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in SUFFIXES
)
LONGEST = 600
VAGUE = {"utils", "util", "common", "misc", "helpers", "helper"}
LICENCE = re.compile(r"(#|//) SPDX-License-Identifier: Apache-2.0\n")


def test_the_scan_finds_the_package() -> None:
    assert {"commrt/env.py", "tests/unit/house/test_style.py"} <= set(FILES)
    assert any(name.endswith(".cpp") for name in FILES)


@pytest.mark.parametrize("name", FILES)
def test_file_is_short_licensed_and_named_for_its_content(name: str) -> None:
    text = (ROOT / name).read_text()
    assert LICENCE.match(text), "the first line is the SPDX line"
    assert text.count("\n") <= LONGEST, f"more than {LONGEST} lines: split it"
    assert Path(name).stem not in VAGUE, "name it for its content"


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_annotations_are_not_evaluated_at_import(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "def " not in text or "from __future__ import annotations\n" in text
