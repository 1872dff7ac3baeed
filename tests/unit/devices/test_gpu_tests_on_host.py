# SPDX-License-Identifier: Apache-2.0
"""The tests for a GPU pass on a CUDA driver whose card is the CPU.

So all of CudaDevice runs without a GPU, with real processes that share its memory.
``tests/support/cuda_on_host`` says in what that driver is like the real one.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import cuda_on_host
import pytest

from commrt.launch.mpiexec import run_process

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300.0


def passed(file: str, environ: dict[str, str], *options: str) -> int:
    """Run tests for a GPU in a process of their own; return how many passed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = run_process(
        [
            *("env", "-C", str(ROOT), sys.executable, "-m", "pytest", "-q"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "120"),
            *(f"tests/gpu/{file}", *options),
        ],
        {**inherited, **environ},
        timeout_s=DEADLINE_S,
    )
    assert done.ok, done.describe_failure() + done.stdout[-8000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    return int(counted[1]) if counted else 0


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("max_delay_us", [0, 200])
@pytest.mark.parametrize("queues", [1, 8, None])
def test_probes_and_the_staged_model(
    queues: int | None, max_delay_us: int, seed: int
) -> None:
    environ = cuda_on_host.environment(
        queues=queues, max_delay_us=max_delay_us, seed=seed
    )
    options = ("--seed", str(seed))
    assert passed("test_gpu_devices.py", environ, *options) > 30


@pytest.mark.parametrize("max_delay_us", [0, 200])
def test_staged_calls_of_threads(max_delay_us: int, full: bool, seed: int) -> None:
    environ = cuda_on_host.environment(max_delay_us=max_delay_us, seed=seed)
    options = ("--seed", str(seed), "--share", "1" if full else "0.3")
    assert passed("test_gpu_staged.py", environ, *options) > 3


def test_kernels(full: bool, seed: int) -> None:
    """Not what NVRTC makes of them: commrt's text, compiled by a C++ compiler."""
    options = ("--seed", str(seed), "--share", "1" if full else "0.1")
    environ = cuda_on_host.environment(seed=seed)
    assert passed("test_kernels_on_gpus.py", environ, *options) > 3


@pytest.mark.full(sample=2)
@pytest.mark.parametrize(("queues", "max_delay_us"), [(None, 0), (None, 200), (1, 0)])
@pytest.mark.parametrize("file", ["test_gpu_processes.py", "test_gpu_other_calls.py"])
def test_processes_that_share_the_card(
    file: str, queues: int | None, max_delay_us: int, full: bool, seed: int
) -> None:
    environ = cuda_on_host.environment(
        queues=queues, max_delay_us=max_delay_us, seed=seed
    )
    share = "1" if full else "0.4"
    options = ("--seed", str(seed), "--share", share, "-k", "not nccl")
    assert passed(file, environ, *options) >= 2
