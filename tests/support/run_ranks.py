# SPDX-License-Identifier: Apache-2.0
"""Ranks that ``python -m commrt.run`` starts, for tests: ``ranks(2, function, a=1)``.

As ``mpi_ranks`` has it for ``mpiexec``: the function runs on every rank, and what it
returned comes back as JSON, in rank order.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from mpi_ranks import KILL_GRACE_S, SpawnedRanks

from commrt.launch.mpiexec import Completed, child_environment, run_process

__all__ = ["RunRanks"]


@dataclass(frozen=True)
class RunRanks(SpawnedRanks):
    """Runs functions and programs on ranks of commrt's own launcher."""

    options: tuple[str, ...] = ()
    """Of the launcher."""

    def survivors(
        self,
        nranks: int,
        function: Callable[..., Any],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
        **arguments: Any,
    ) -> dict[int, Any]:
        """Return what a function returned, by the ranks that were not killed."""
        ranks = replace(self, options=(*self.options, "--keep-going"))
        argv, results = ranks._job(function, deadline_s, arguments)
        done = ranks.program(nranks, argv, env=env, deadline_s=deadline_s)
        if not done.ok:
            pytest.fail(done.describe_failure())
        files = {int(file.stem): file for file in results.glob("*.json")}
        return {rank: json.loads(files[rank].read_text()) for rank in sorted(files)}

    def program(
        self,
        nranks: int,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        deadline_s: float = 300.0,
    ) -> Completed:
        """Run ``python *argv`` on ranks, and return how that ended."""
        # In a checkout, -m would find the folder commrt, which has no engine.
        elsewhere = ["env", "-C", os.sep]
        options = ["-n", str(nranks), *self.options]
        launched = [sys.executable, "-m", "commrt.run", *options, *argv]
        return run_process(
            [*elsewhere, *launched],
            {**child_environment(sys.executable), **(env or {})},
            timeout_s=deadline_s + KILL_GRACE_S,
        )
