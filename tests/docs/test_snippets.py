# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of README and docs run: what is written there is true."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import blocks_of, pages_with

from commrt.errors import BackendError
from commrt.launch.mpiexec import child_environment, find_launcher, run_ranks

PAGES = pages_with("python")
DEADLINE_S = 100.0


def _program(page: str, folder: Path) -> Path:
    """Write all blocks of a page, in order, as one program."""
    program = folder / "program.py"
    program.write_text("\n\n".join(blocks_of(page, "python")))
    return program


def _first_block(folder: Path) -> Path:
    program = folder / "average.py"
    program.write_text(blocks_of("README.md", "python")[0])
    return program


def _mpiexec_or_skip() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: no MPI ranks")
    try:
        find_launcher()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_in_plain_python(page: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(_program(page, tmp_path))],
        env=child_environment(sys.executable),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_on_mpi_ranks(page: str, tmp_path: Path) -> None:
    _mpiexec_or_skip()
    program = str(_program(page, tmp_path))
    done = run_ranks(sys.executable, 3, [program], timeout_s=DEADLINE_S)
    assert done.ok, done.describe_failure()


def test_readme_prints_once_for_four_mpi_ranks(tmp_path: Path) -> None:
    _mpiexec_or_skip()
    program = str(_first_block(tmp_path))
    done = run_ranks(sys.executable, 4, [program], timeout_s=DEADLINE_S)
    assert done.ok, done.describe_failure()
    assert done.stdout == "average over 4 ranks: 1.5\n"
