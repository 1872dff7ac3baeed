# SPDX-License-Identifier: Apache-2.0
"""Tests that need torch: ranks that torchrun starts, in an environment of their own.

``make test-torch`` runs them. The folder is not called torch: for tests that lie beside
it, ``import torch`` would find it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mpi_ranks import KILL_GRACE_S, SpawnedRanks, mpirun

from commrt.mpiexec import Completed, child_environment, run_process

__all__ = ["mpirun", "torchrun"]


@dataclass(frozen=True)
class TorchRun(SpawnedRanks):
    """Runs functions and programs on ranks that torchrun starts."""

    def program(
        self,
        nranks: int,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 40.0,
    ) -> Completed:
        """Run ``python *argv`` on torchrun's ranks, and return how that ended."""
        torchrun = Path(os.path.abspath(sys.executable)).with_name("torchrun")
        command = [str(torchrun), "--standalone", "--nproc-per-node", str(nranks)]
        # torchrun says that it sets it, unless it is set.
        settings = {"OMP_NUM_THREADS": "1", **(env or {})}
        return run_process(
            [*command, *argv],
            {**child_environment(sys.executable), **settings},
            timeout_s=deadline_s + KILL_GRACE_S,
        )


@pytest.fixture
def torchrun(tmp_path: Path) -> TorchRun:
    """Return a way to run functions on torchrun's ranks."""
    return TorchRun(tmp_path)
