# SPDX-License-Identifier: Apache-2.0
"""The pretended library of NVTX (``fake_nvtx.cpp``), and what ranges in it say."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

__all__ = ["begun", "build", "build_injection", "lines_of"]

_SOURCE = Path(__file__).parent / "fake_libraries" / "fake_nvtx.cpp"


def build_injection(folder: Path, headers: Path) -> Path:
    """Return what the real library of NVTX is given to take its calls."""
    source = _SOURCE.with_name("nvtx_injection.cpp")
    return _compiled(source, folder / "libinjected_nvtx.so", f"-I{headers}")


def build(folder: Path) -> Path:
    """Return the library, compiled into a folder."""
    return _compiled(_SOURCE, folder / "libpretended_nvtx.so")


def _compiled(source: Path, path: Path, *flags: str) -> Path:
    compiler = shutil.which("g++")
    assert compiler is not None, "building commrt needs g++, too"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *flags, "-o", str(path)]
    environ = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run([*command, str(source)], check=True, timeout=300, env=environ)
    return path


def lines_of(library: Path) -> Callable[[], list[str]]:
    """Return what gives and forgets the lines so far; there are none now."""
    lines = ctypes.CDLL(str(library)).fake_lines
    lines.restype = ctypes.c_char_p
    lines()
    return lambda: lines().decode().splitlines()


def begun(lines: list[str]) -> list[str]:
    """Return what ranges say; each has ended, and none was wrong."""
    assert not [line for line in lines if "wrong" in line], lines
    assert lines.count("end") == len([line for line in lines if line != "end"])
    return sorted({line for line in lines if line != "end"})
