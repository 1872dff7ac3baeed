# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, so that only the first start on a machine compiles.

Files are written whole or not at all. One that is broken is compiled again, and where
nothing can be written the kernels are compiled at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from commrt import env
from commrt.files.write import write_file

__all__ = ["folder", "key", "load", "save"]

_MAGIC = b"commrt kernels 1\n"
_DIGEST_NBYTES = 32


def folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of compiled kernels; None if the user has no home."""
    named = env.value("COMMRT_KERNEL_CACHE", environ)
    if named is not None:
        return Path(named)
    environ = os.environ if environ is None else environ
    try:
        base = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None
    return base / "commrt" / "kernels"


def key(*parts: object) -> str:
    """Return a name for what these determine."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


def load(where: Path | None, name: str) -> bytes | None:
    """Return the saved kernels; None if there are none, or the file is broken."""
    if where is None:
        return None
    try:
        content = (where / name).read_bytes()
    except OSError:
        return None
    begin = len(_MAGIC) + _DIGEST_NBYTES
    image = content[begin:]
    if content[:begin] != _MAGIC + hashlib.sha256(image).digest():
        return None
    return image


def save(where: Path | None, name: str, image: bytes) -> None:
    """Keep it; nothing happens where that is not possible.

    Others see the whole file or none: ranks of one node may save it at the same time.
    """
    if where is None:
        return
    content = _MAGIC + hashlib.sha256(image).digest() + image
    with contextlib.suppress(OSError):
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(where / name, content, mode=0o600)
