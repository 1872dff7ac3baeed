# SPDX-License-Identifier: Apache-2.0
"""Reads files that somebody else may have prepared: regular ones, up to a limit.

A FIFO or a device would block or never end. So a file is opened without waiting and
looked at before the first byte is read. What is packed is unpacked up to a limit, too.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from commrt.errors import CommError
from commrt.files.visible import visible

__all__ = ["Kind", "lines_of", "read_text"]

_PIECE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of files: how messages call it, and how long one may be."""

    name: str
    """As in "selection table"."""
    made_by: str
    """What makes one, as in "a YAML file that commrt-tune wrote"."""
    most_nbytes: int
    """Bytes of the longest one, unpacked."""
    error: type[CommError]
    """What is raised where a file is none of this kind."""
    most_line_nbytes: int = 0
    """Bytes of the longest line, where lines are read one by one."""

    def refused(self, path: Path, why: str) -> CommError:
        """Return the error for a file of another kind."""
        return self.error(f"{visible(str(path))} is no {self.name}: {why}")


def read_text(path: Path, kind: Kind) -> str:
    """Return a file's text, unpacked where its name ends in ``.gz``.

    Raises:
        CommError: the kind's error: it is no regular file, too long, or no text.
    """
    with _opened(path, kind) as file:
        if path.suffix == ".gz":
            raw = b"".join(_unpacked(file, path, kind))
        else:
            raw = file.read(kind.most_nbytes + 1)
    if len(raw) > kind.most_nbytes:
        raise _too_long(path, kind)
    return _decoded(raw, path, kind)


def lines_of(path: Path, kind: Kind) -> Iterator[str]:
    """Yield a file's lines without their ends, one by one; raises as ``read_text``."""
    left = kind.most_nbytes
    with _opened(path, kind) as file:
        number = 0
        while raw := file.readline(kind.most_line_nbytes + 1):
            number += 1
            left -= len(raw)
            if len(raw) > kind.most_line_nbytes:
                raise kind.refused(
                    path,
                    f"line {number} is longer than {kind.most_line_nbytes} bytes; "
                    f"expected {kind.made_by}",
                )
            if left < 0:
                raise _too_long(path, kind)
            yield _decoded(raw, path, kind).removesuffix("\n")


@contextmanager
def _opened(path: Path, kind: Kind) -> Iterator[BinaryIO]:
    shown = visible(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise kind.error(
            f"cannot open the {kind.name} {shown}: {_reason(error)}; expected "
            f"{kind.made_by}: check the path and its permissions"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise kind.error(
            f"{shown} is not a regular file: name a {kind.name}, {kind.made_by}"
        )
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise kind.error(
                f"cannot read the {kind.name} {shown}: {_reason(error)}; expected "
                f"{kind.made_by}: copy it to a file system that works"
            ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _too_long(path: Path, kind: Kind) -> CommError:
    return kind.error(
        f"{visible(str(path))} is larger than any {kind.name} (limit "
        f"{kind.most_nbytes} bytes): name {kind.made_by}"
    )


def _decoded(raw: bytes, path: Path, kind: Kind) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise kind.refused(
            path, f"not UTF-8 text: {error}; expected {kind.made_by}"
        ) from error


def _unpacked(file: BinaryIO, path: Path, kind: Kind) -> Iterator[bytes]:
    """Yield what is packed, up to a byte more than the limit."""
    left = kind.most_nbytes + 1
    unpacker = zlib.decompressobj(wbits=31)
    try:
        while left > 0:
            packed = unpacker.unconsumed_tail or file.read(_PIECE_NBYTES)
            if not packed:
                raise kind.refused(
                    path, f"it is cut short; expected {kind.made_by}: copy it again"
                )
            piece = unpacker.decompress(packed, min(left, _PIECE_NBYTES))
            left -= len(piece)
            yield piece
            if not unpacker.eof:
                continue
            rest = unpacker.unused_data or file.read(_PIECE_NBYTES)
            if not rest:
                return
            raise kind.refused(
                path, f"more follows its packed end; expected {kind.made_by}"
            )
    except zlib.error as error:
        raise kind.refused(
            path, f"it is not gzipped: {error}; expected {kind.made_by}"
        ) from error
