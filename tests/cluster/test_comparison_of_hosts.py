# SPDX-License-Identifier: Apache-2.0
"""The benchmark between hosts, small: it makes hosts, compares, and leaves nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cluster_commands import ClusterCommands, machine

from commrt.launch.mpiexec import run_process

LIMIT_S = 300


@pytest.mark.parametrize("placement", ["2x1", "2,1"])
def test_libraries_are_compared_between_hosts(
    cluster: ClusterCommands, tmp_path: Path, placement: str
) -> None:
    before = machine()
    ops = "allreduce,send_recv"
    words = f"-p {placement} --rate 1gbit --op {ops} --sizes 8,10000 --launches 1"
    raw = tmp_path / "raw.json"
    argv = [sys.executable, "-m", "commrt.bench.cluster", *words.split()]
    done = run_process(
        [*argv, "--budget-s", "0.05", "--out", str(raw)],
        cluster.environ(),
        timeout_s=LIMIT_S,
    )
    assert done.ok, done.describe_failure()
    assert f"| {placement} | mpi4py |" in done.stdout
    data = json.loads(raw.read_text())
    assert [one["peer"] for one in data["launches"]] == ["commrt", "mpi4py"] * 2
    for one in data["launches"]:
        assert [row["nbytes"] for row in one["rows"]] == [8, 10000]
        assert all(row["valid"] for row in one["rows"])
    assert cluster.all_ended()
    assert machine() == before
