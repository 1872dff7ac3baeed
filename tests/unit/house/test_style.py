# SPDX-License-Identifier: Apache-2.0
"""House rules that no linter checks."""

from __future__ import annotations

import re
from pathlib import Path

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


TEXTS = {name: (ROOT / name).read_text() for name in FILES}


def test_every_file_begins_with_its_licence() -> None:
    assert [name for name, text in TEXTS.items() if not LICENCE.match(text)] == []


def test_no_file_is_long() -> None:
    """A longer one is to be split."""
    assert [name for name, text in TEXTS.items() if text.count("\n") > LONGEST] == []


def test_files_are_named_for_their_content() -> None:
    assert [name for name in FILES if Path(name).stem in VAGUE] == []


def test_annotations_are_not_evaluated_at_import() -> None:
    wanted = "from __future__ import annotations\n"
    without = [
        name
        for name, text in TEXTS.items()
        if name.endswith(".py") and "def " in text and wanted not in text
    ]
    assert without == []
