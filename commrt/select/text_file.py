# SPDX-License-Identifier: Apache-2.0
"""Reads a small text file that somebody else may have prepared."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from commrt.errors import TableError
from commrt.select.tree import MAX_NBYTES

__all__ = ["read_text"]


def read_text(path: Path) -> str:
    """Return the file's text; TableError if it is not a small regular text file.

    A FIFO or a device would block or never end, so the file is opened without waiting
    and looked at before the first byte is read; at most the size limit is read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise TableError(
            f"cannot open selection table {path}: {error}; expected a YAML file that "
            f"commrt-tune wrote: check the path and its permissions"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TableError(
                f"selection table {path} is not a regular file: name a YAML file that "
                f"commrt-tune wrote"
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            raw = file.read(MAX_NBYTES + 1)
    except OSError as error:
        raise TableError(
            f"cannot read selection table {path}: {error}; expected a YAML file that "
            f"commrt-tune wrote: copy it to a file system that works"
        ) from error
    finally:
        os.close(descriptor)
    if len(raw) > MAX_NBYTES:
        raise TableError(
            f"{path} is larger than any selection table (limit {MAX_NBYTES} bytes): "
            f"name a file that commrt-tune wrote"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise TableError(
            f"selection table {path} is not UTF-8 text: {error}; save it as UTF-8"
        ) from error
