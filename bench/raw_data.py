# SPDX-License-Identifier: Apache-2.0
"""Files of raw data, gzipped where their name says so."""

from __future__ import annotations

import gzip
from pathlib import Path

__all__ = ["read_data", "write_data"]


def read_data(path: Path) -> str:
    """Return the text of a file, unpacked where its name ends in ``.gz``.

    Raises:
        OSError: it cannot be read, or is not gzipped.
        EOFError: it is cut short.
        UnicodeDecodeError: it is not text.
    """
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def write_data(path: Path, text: str) -> None:
    """Write the text, gzipped where the name ends in ``.gz``, always the same way."""
    raw = text.encode()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
