# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun starts, for tests: ``torchrun(2, function, argument=1)``.

As ``mpi_ranks`` has it for ``mpiexec``: the function runs on every rank, and what it
returned comes back as JSON, in rank order.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mpi_ranks import KILL_GRACE_S, SpawnedRanks

from commrt.launch.mpiexec import Completed, child_environment, run_process

__all__ = ["TorchRun", "torchrun"]


@dataclass(frozen=True)
class TorchRun(SpawnedRanks):
    """Runs functions and programs on ranks that torchrun starts."""

    def program(
        self,
        nranks: int,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
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
