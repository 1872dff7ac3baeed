# SPDX-License-Identifier: Apache-2.0
"""Files of raw data, gzipped where their name says so."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commrt.errors import UsageError
from commrt.files.plain_json import MalformedError, parsed
from commrt.files.read import Kind, read_text
from commrt.files.write import check_writable, write_file

__all__ = ["check_output", "damage_told", "read_data", "write_data", "write_output"]


RAW_DATA = Kind(
    "file of raw data",
    "what --out of the same command wrote",
    most_nbytes=64 << 20,
    error=UsageError,
)


def read_data(path: Path, schema: str) -> dict[str, Any]:
    """Return what ``write_data`` wrote by a schema; UsageError for anything else."""
    text = read_text(path, RAW_DATA)
    try:
        found = parsed(text).value
    except MalformedError as error:
        raise RAW_DATA.refused(path, str(error)) from error
    if not isinstance(found, dict) or found.get("schema") != schema:
        raise RAW_DATA.refused(
            path, f"its schema is not {schema}; expected {RAW_DATA.made_by}"
        )
    return found


@contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Raise UsageError where what was read from a file does not fit its schema."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as why:
        if isinstance(why, UsageError):
            raise
        raise RAW_DATA.refused(
            path, f"it is damaged ({why!r}); expected {RAW_DATA.made_by}"
        ) from why


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
