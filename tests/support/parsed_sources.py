# SPDX-License-Identifier: Apache-2.0
"""Python files as syntax trees, read once for all tests of a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["ROOT", "files_of", "parsed"]

ROOT = Path(__file__).parents[2]


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file, which no test may change."""
    return ast.parse(path.read_text())


def files_of(*folders: str) -> list[Path]:
    """Return the Python files below folders of the project, in order."""
    return [path for each in folders for path in sorted((ROOT / each).rglob("*.py"))]
