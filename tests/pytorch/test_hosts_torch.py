# SPDX-License-Identifier: Apache-2.0
"""Process groups of torch on ranks that ``commrt.run --hosts`` has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import remote_shell

from commrt.launch.mpiexec import child_environment

DEADLINE_S = 300.0
SUMS = """\
import os, sys
import torch
import torch.distributed as dist
import commrt.torch
dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
x = torch.full((1001,), rank + 1.0)
dist.all_reduce(x)
pair = dist.new_group([0, 2])
if rank != 1:
    dist.all_reduce(x, group=pair)
found = [None] * 3
dist.all_gather_object(found, rank)
os.write(1, f"{rank} {x.min()} {x.max()} {found}\\n".encode())
dist.destroy_process_group()
"""


def run(program: Path, text: str, *words: str, **variables: str) -> list[str]:
    """Return the sorted lines of a program on two hosts, which are this one."""
    program.write_text(text)
    shell = f"{sys.executable} {remote_shell.__file__}"
    hosts = ["--hosts", "localhost:2,127.0.0.1", "--ssh", shell]
    done = subprocess.run(
        [sys.executable, "-m", "commrt.run", *hosts, str(program), *words],
        env={**child_environment(sys.executable), **variables},
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("backend", ["commrt", "gloo"])
def test_groups_of_torch_meet_on_hosts(tmp_path: Path, backend: str) -> None:
    """commrt's by the launcher's store, gloo's as their variables say."""
    said = run(tmp_path / "sums.py", SUMS, backend, COMMRT_NODES="2,1")
    assert said == [
        "0 12.0 12.0 [0, 1, 2]",
        "1 6.0 6.0 [0, 1, 2]",
        "2 12.0 12.0 [0, 1, 2]",
    ]


RUNS = """\
import os, sys
if sys.argv[1] == "with torch":
    import torch
import numpy as np
import commrt
comm = commrt.init()
x = np.ones(1001)
comm.allreduce(x)
try:
    comm.allreduce(x, backend="gloo", algorithm="native")
    native = f"ran {x[0]}"
except commrt.errors.UsageError as error:
    native = "torch when they met" in str(error)
runs = comm.explain("allreduce", 8192).choice.candidate.backend
os.write(1, f"{runs} {native} {'torch' in sys.modules}\\n".encode())
"""


def test_gloo_serves_those_who_use_torch(tmp_path: Path) -> None:
    """A program that does not import torch does not wait for its import."""
    for how, line in (("with torch", "tcp ran 9.0 True"), ("", "tcp True False")):
        said = run(tmp_path / "runs.py", RUNS, how, COMMRT_NODES="2,1")
        assert said == [line] * 3
