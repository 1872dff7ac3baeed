# SPDX-License-Identifier: Apache-2.0
"""Pretended libraries in C++, compiled once for their sources and flags."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["ENGINE", "build_stub"]

ENGINE = Path(__file__).parents[2] / "commrt" / "native"
_SUPPORT = Path(__file__).parent
_BUILT = Path(__file__).parents[2] / "build"


def build_stub(
    folder: str,
    name: str,
    *,
    beside: Sequence[str] = (),
    headers: Sequence[str] = (),
    defines: Sequence[str] = (),
) -> Path:
    """Return the library ``name``, made of ``tests/support/FOLDER`` if that changed.

    ``beside`` are folders whose sources belong to it, too; ``headers`` are those of the
    engine that it includes.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip(f"g++ is not installed: the pretended {name} cannot be compiled")
    folders = [_SUPPORT / each for each in (folder, *beside)]
    sources = [each for place in folders for each in sorted(place.glob("*.[ch]pp"))]
    flags = "-std=c++17 -O0 -shared -fPIC -fvisibility=hidden -pthread"
    flags += "".join(f" -I{each}" for each in (ENGINE, *folders))
    if "libtsan" in os.environ.get("LD_PRELOAD", ""):
        flags += " -fsanitize=thread -g1"  # or how its threads are ordered is not seen
    digest = hashlib.sha256(repr((tuple(defines), flags)).encode())
    for source in [*sources, *(ENGINE / header for header in headers)]:
        digest.update(source.read_bytes())
    place = _BUILT / folder / digest.hexdigest()[:16]
    made = place / name
    if made.exists():
        return made
    place.mkdir(parents=True, exist_ok=True)
    partial = place / f"{os.getpid()}.so"
    environ = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    code = [str(source) for source in sources if source.suffix == ".cpp"]
    subprocess.run(
        [
            compiler,
            *flags.split(),
            f"-Wl,-soname,{name}",
            *(f"-D{define}" for define in defines),
            *code,
            "-o",
            str(partial),
        ],
        check=True,
        env=environ,
    )
    partial.rename(made)
    return made
