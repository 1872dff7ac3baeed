# SPDX-License-Identifier: Apache-2.0
"""The Makefile names the package that is missing, and needs nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# What every Debian has, and make.
ALWAYS = ("bash", "sed", "find", "sh", "uname", "make")
PYTHON = """#!/bin/sh
# Stands for an interpreter: fails where the code it is given contains MISSING.
case "$2" in *"{missing}"*) exit 1;; esac
"""


def check_tools(
    folder: Path, *present: str, missing: str = "", **variables: str
) -> str:
    """Return what ``make check-tools`` says with only some programs on PATH."""
    for name in (*ALWAYS, *present):
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    if missing != "python3":
        python = folder / "python3"
        python.write_text(PYTHON.format(missing=missing or "nothing at all"))
        python.chmod(0o755)
    arguments = [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(
        ["make", "--no-print-directory", "check-tools", *arguments],
        cwd=ROOT,
        env={"PATH": str(folder), "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr


def test_nothing_is_said_where_nothing_is_missing(tmp_path: Path) -> None:
    assert check_tools(tmp_path, "g++") == ""


@pytest.mark.parametrize(
    ("missing", "what", "package"),
    [
        ("ensurepip", "Python's venv module", "python3-venv"),
        ("Python.h", "Python's headers (Python.h)", "python3-dev"),
        ("python3", "python3", "python3 python3-venv python3-dev"),
    ],
)
def test_a_missing_part_of_python_is_named_with_its_package(
    tmp_path: Path, missing: str, what: str, package: str
) -> None:
    said = check_tools(tmp_path, "g++", missing=missing)
    assert f"commrt needs {what}: package {package}\n" in said
    assert f"On Debian or Ubuntu: apt-get install {package}\n" in said


def test_a_missing_compiler_is_named_together_with_the_rest(tmp_path: Path) -> None:
    said = check_tools(tmp_path, missing="Python.h")
    assert "commrt needs a C++ compiler: package g++\n" in said
    assert "On Debian or Ubuntu: apt-get install g++ python3-dev\n" in said


def test_an_old_python_is_refused_with_the_way_to_name_another(tmp_path: Path) -> None:
    said = check_tools(tmp_path, "g++", missing="version_info")
    assert "commrt needs Python 3.10 or newer, and python3 is older" in said
    assert "make PYTHON=/path/to/python3" in said


def test_tuning_and_tests_begin_with_that_check(tmp_path: Path) -> None:
    """Not deep in a build: the first recipe of a fresh checkout is the check."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for target in ("tune", "test", "install"):
        # Without the make that it starts: that one would plan the same once more.
        plan = dry_run(tmp_path, target, "MAKE=true")
        lines = [line for line in plan.splitlines() if line]
        assert lines[0].startswith('[ "$(uname -s)" = Linux ]'), target
        assert plan.count("-m venv .venv\n") == 1


def dry_run(folder: Path, *arguments: str) -> str:
    """Return what make would do, with the Makefile of a fresh checkout."""
    return subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    ).stdout


@pytest.mark.parametrize(
    ("seed", "drawn", "other"), [(2, "asan", "tsan"), (3, "tsan", "asan")]
)
def test_what_tests_need_is_prepared_with_the_sanitizer_that_is_drawn(
    tmp_path: Path, seed: int, drawn: str, other: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    plan = dry_run(tmp_path, "environments", f"SEED={seed}")
    assert f"build-dir=build/{drawn}/cmake" in plan
    assert f"build-dir=build/{other}/cmake" not in plan
    for folder in (".venv-mpich", ".venv-torch"):
        assert plan.count(f"-m venv {folder}\n") == 1
