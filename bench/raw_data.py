# SPDX-License-Identifier: Apache-2.0
"""Files of raw data, gzipped where their name says so."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

__all__ = ["check_replaceable", "read_data", "replace_file", "write_data"]


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
    replace_file(path, gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)


def replace_file(path: Path, raw: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        part.write_bytes(raw)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raise the OSError that ``replace_file`` would; the file is left as it is."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        part.touch()
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")
