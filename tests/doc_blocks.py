# SPDX-License-Identifier: Apache-2.0
"""The programs in README and docs, by the language of their blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks_of(page: str, language: str) -> list[str]:
    """Return a page's blocks of a language, in order."""
    block = re.compile(rf"^```{language}\n(.*?)^```$", re.S | re.M)
    return block.findall((ROOT / page).read_text())


def pages_with(language: str) -> list[str]:
    """Return the pages that have any, as paths from the checkout."""
    paths = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    pages = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    return [page for page in pages if blocks_of(page, language)]
