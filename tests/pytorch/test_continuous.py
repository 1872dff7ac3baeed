# SPDX-License-Identifier: Apache-2.0
"""Scenarios on torch's own harness for tests of backends, each beside gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commrt.launch.mpiexec import child_environment, run_process

SUITE = Path(__file__).with_name("continuous_suite.py")
LEAST = 88
"""Scenarios there are at least, for two ranks and more."""
LEAST_ALONE = 72
"""And for one."""
DEADLINE_S = 300.0


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [(1, ""), (2, ""), (3, ""), (4, ""), (2, "1"), (3, "2,1"), (4, "2")],
)
@pytest.mark.full(sample=1)
def test_scenarios_beside_gloo(ranks: int, nodes: str) -> None:
    environ = {**child_environment(sys.executable), "OMP_NUM_THREADS": "1"}
    done = run_process(
        [sys.executable, str(SUITE), "--ranks", str(ranks)],
        {**environ, **({"COMMRT_NODES": nodes} if nodes else {})},
        timeout_s=DEADLINE_S,
    )
    assert done.ok, done.describe_failure()
    said = done.stdout.splitlines()[-1].split()
    assert int(said[0]) >= (LEAST_ALONE if ranks == 1 else LEAST)
    assert said[3:5] == ["0", "of"]
