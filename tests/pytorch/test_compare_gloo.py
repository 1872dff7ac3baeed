# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench compare`` with torch's gloo as a peer, on real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from commrt.launch.mpiexec import child_environment, run_process


def test_gloo_is_compared_where_torch_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not in the repository's root, whose source tree would hide the installed wheel.
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "raw.json"
    command = [sys.executable, "-m", "commrt.bench", "compare"]
    command += ["--op", "allreduce,alltoall"]
    command += ["--ranks", "2", "--sizes", "8:4096:512", "--launches", "1"]
    command += ["--iterations", "30", "--budget-s", "0.2", "--out", str(raw)]
    environ = {**child_environment(sys.executable), "XDG_CONFIG_HOME": str(tmp_path)}
    done = run_process(command, environ, timeout_s=300)
    assert done.ok, done.describe_failure()
    data = json.loads(raw.read_text())
    assert data["failures"] == []
    assert [(one["coll"], one["peer"]) for one in data["launches"]] == [
        (coll, peer)
        for coll in ("allreduce", "alltoall")
        for peer in ("commrt", "mpi4py", "gloo")
    ]
    for one in data["launches"]:
        assert [row["nbytes"] for row in one["rows"]] == [8, 4096]
        assert all(row["valid"] and row["samples_us"] for row in one["rows"])
    assert f"- gloo: gloo of torch {torch.__version__}" in done.stdout
