# SPDX-License-Identifier: Apache-2.0
"""What ``tests/gpu`` asks of NCCL and a GPU, asked of libraries that have none.

The real CudaDevice and NCCL backend run in processes, over ``cuda_on_host`` and the
pretended NCCL for processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cuda_on_host
import pytest
from nccl_of_processes import NcclOfProcesses

DEADLINE_S = 300.0
GPU = Path(__file__).parents[2] / "gpu"


@pytest.mark.full(sample=1)
@pytest.mark.parametrize(("version", "skipped"), [(22809, 1), (23203, 0)])
def test_calls_of_nccl_by_processes(
    version: int, skipped: int, seed: int, tmp_path: Path
) -> None:
    nccl = NcclOfProcesses(tmp_path, version)
    files = ["test_gpu_processes.py", "test_gpu_graphs.py"]
    words = ["-q", "-k", "nccl", "-p", "no:cacheprovider", "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *(str(GPU / file) for file in files)],
        env={**os.environ, **cuda_on_host.environment(), **nccl.environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Two ranks on a GPU are for newer versions only.
    assert done.stdout.count("SKIPPED") == skipped, done.stdout
    assert nccl.complaints() == []
