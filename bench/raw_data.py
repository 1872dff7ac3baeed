# SPDX-License-Identifier: Apache-2.0
"""Files of raw data, gzipped where their name says so."""

from __future__ import annotations

import gzip
from pathlib import Path

from commrt.errors import UsageError
from commrt.files.write import check_writable, write_file

__all__ = ["check_output", "read_data", "write_data", "write_output"]


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
    packed = gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw
    write_file(path, packed, parents=True)


def check_output(path: Path) -> None:
    """Raise the UsageError that ``write_output`` would, before anything is measured."""
    try:
        check_writable(path, parents=True)
    except OSError as error:
        raise _not_written(path, error) from error


def write_output(path: Path, text: str) -> None:
    """Write the text to the file of ``--out``; UsageError where that cannot be."""
    try:
        write_data(path, text)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--out {path} cannot be written: {error.strerror or error}; name a file in a "
        f"folder that you may write to"
    )
