# SPDX-License-Identifier: Apache-2.0
"""A pretended libnvrtc, for tests of what is looked for, cached and said."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["HIDDEN", "build"]

HIDDEN = "pretended_nvrtc.so"
"""For a test that opens it in its own process: once a library of NVRTC's name is
mapped, later tests would find it "loaded already"."""

_SOURCE = Path(__file__).parent / "fake_libraries" / "fake_nvrtc.cpp"


def build(
    folder: Path,
    version: str = "12.9",
    name: str = "libnvrtc.so.12",
    *,
    soname: bool = False,
) -> Path:
    """Return the library, compiled into ``folder``; with its name inside, if wanted."""
    compiler = shutil.which("g++")
    assert compiler is not None, "building commrt needs g++, too"
    path = folder / name
    define = f"-DFAKE_NVRTC_VERSION={version.replace('.', '')}"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", define]
    if soname:
        command.append(f"-Wl,-soname,{name}")
    environ = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run(
        [*command, "-o", str(path), str(_SOURCE)], check=True, timeout=300, env=environ
    )
    return path
