# SPDX-License-Identifier: Apache-2.0
"""What ``tests/gpu`` asks of NCCL and a GPU, asked of libraries that have none.

The real CudaDevice and NCCL backend run in processes, over ``cuda_on_host`` and the
pretended NCCL for processes.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import cuda_on_host
import pytest
from nccl_of_processes import NcclOfProcesses

from commrt.launch.mpiexec import run_process

DEADLINE_S = 300.0
ROOT = Path(__file__).parents[3]


@pytest.mark.full(sample=1)
@pytest.mark.parametrize(("version", "skipped"), [(22809, 1), (23203, 0)])
@pytest.mark.parametrize("queues", [1, 8, None])
def test_calls_of_nccl_by_processes(
    version: int, skipped: int, queues: int | None, seed: int, tmp_path: Path
) -> None:
    nccl = NcclOfProcesses(tmp_path, version)
    card = cuda_on_host.environment(
        queues=queues, max_delay_us=random.Random(seed).choice([0, 200]), seed=seed
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = run_process(
        [
            *("env", "-C", str(ROOT), sys.executable, "-m", "pytest", "-q"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "120"),
            *("-k", "nccl", "--seed", str(seed)),
            *(f"tests/gpu/test_gpu_{name}.py" for name in ("processes", "graphs")),
        ],
        {**inherited, **card, **nccl.environment},
        timeout_s=DEADLINE_S,
    )
    assert done.ok, done.describe_failure() + done.stdout[-8000:]
    # Two ranks on a GPU are for newer versions only.
    assert done.stdout.count("SKIPPED") == skipped, done.stdout
    assert nccl.complaints() == []
