# SPDX-License-Identifier: Apache-2.0
"""Selection tables as files."""

from __future__ import annotations

from pathlib import Path

from commrt.errors import TableError
from commrt.files import read
from commrt.select.tree import MAX_NBYTES

__all__ = ["TABLES", "read_text"]

TABLES = read.Kind(
    "selection table", "a YAML file that commrt-tune wrote", MAX_NBYTES, TableError
)


def read_text(path: Path) -> str:
    """Return the file's text; TableError if it is not a small regular text file."""
    return read.read_text(path, TABLES)
