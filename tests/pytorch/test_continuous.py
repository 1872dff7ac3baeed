# SPDX-License-Identifier: Apache-2.0
"""Scenarios on torch's own harness for tests of backends, each beside gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commrt.launch.mpiexec import child_environment, run_process

SUITE = Path(__file__).with_name("continuous_suite.py")
LEAST = 70
"""Scenarios there are at least."""
DEADLINE_S = 110.0


@pytest.mark.parametrize(
    "ranks",
    [
        2,
        pytest.param(3, marks=pytest.mark.full),
        pytest.param(4, marks=pytest.mark.full),
    ],
)
def test_scenarios_beside_gloo(ranks: int) -> None:
    done = run_process(
        [sys.executable, str(SUITE), "--ranks", str(ranks)],
        {**child_environment(sys.executable), "OMP_NUM_THREADS": "1"},
        timeout_s=DEADLINE_S,
    )
    assert done.ok, done.describe_failure()
    said = done.stdout.splitlines()[-1].split()
    assert int(said[0]) >= LEAST
    assert said[3:5] == ["0", "of"]
