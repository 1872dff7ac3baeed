# SPDX-License-Identifier: Apache-2.0
"""Programs of pages, run in plain Python and on MPI ranks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from commrt.errors import BackendError
from commrt.launch.mpiexec import (
    Completed,
    child_environment,
    find_launcher,
    run_ranks,
)

_DEADLINE_S = 300.0


def run_plainly(program: Path) -> subprocess.CompletedProcess[str]:
    """Return what a program did as a world of one; a warning ends it."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        env=child_environment(sys.executable),
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )


def run_on_ranks(ranks: int, program: Path) -> Completed:
    """Return what a program did on so many ranks; skip the test where no MPI is."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: no MPI ranks")
    try:
        find_launcher()
    except BackendError as error:
        pytest.skip(str(error))
    return run_ranks(sys.executable, ranks, [str(program)], timeout_s=_DEADLINE_S)
