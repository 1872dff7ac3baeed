# SPDX-License-Identifier: Apache-2.0
"""The pages of README and docs, and the programs in them, by their language."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def all_pages() -> list[str]:
    """Return README and every page of docs, as paths from the checkout."""
    paths = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def how_tos() -> list[str]:
    """Return the pages that each show one task."""
    return [page for page in all_pages() if page.startswith("docs/how-to/")]


def blocks_of(page: str, language: str) -> list[str]:
    """Return a page's blocks of a language, in order."""
    found = _FENCED.findall((ROOT / page).read_text())
    return [text for said, text in found if said == language]


def first_block_of(page: str) -> tuple[str, str, str]:
    """Return what stands before a page's first block, its language, and its text."""
    text = (ROOT / page).read_text()
    found = _FENCED.search(text)
    assert found is not None, f"{page} has no program"
    return text[: found.start()], found[1], found[2]


def pages_with(language: str) -> list[str]:
    """Return the pages that have blocks of a language."""
    return [page for page in all_pages() if blocks_of(page, language)]


def sides_of(page: str) -> dict[str, str]:
    """Return the programs of a page that shows each example twice, by library.

    A block's library stands before it, as the last word of its paragraph and a colon.
    All blocks of one library are one program.
    """
    found = re.findall(
        r"(?:^|\s)([\w.]+):\n\n```\w+\n(.*?)^```$",
        (ROOT / page).read_text(),
        re.S | re.M,
    )
    programs: dict[str, list[str]] = {}
    for library, block in found:
        programs.setdefault(library, []).append(block)
    return {library: "\n\n".join(blocks) for library, blocks in programs.items()}


def printing_into(folder: Path, program: str) -> str:
    """Return a program each of whose ranks prints into a file of its own.

    Lines that ranks print at once may come out as one.
    """
    into = f"open(f'{folder}/{{os.getpid()}}.txt', 'w', buffering=1)"
    return f"import os\nimport sys\n\nsys.stdout = {into}\n{program}"


def printed_into(folder: Path) -> list[str]:
    """Return the lines that all ranks printed, sorted."""
    texts = [file.read_text() for file in folder.glob("*.txt")]
    return sorted("".join(texts).splitlines())
