# SPDX-License-Identifier: Apache-2.0
"""Ranks on hosts of a cluster, with the variables that torchrun sets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster_commands import clusters_in

SUM = """\
import os, socket, sys
import torch
import torch.distributed as dist
import commrt.torch
dist.init_process_group(sys.argv[1])
x = torch.full((1001,), dist.get_rank() + 1.0)
dist.all_reduce(x)
line = f"{socket.gethostname()} {dist.get_rank()} {x.min()} {x.max()}\\n"
os.write(1, line.encode())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["gloo", "commrt"])
def test_ranks_of_torchrun_sum_over_uneven_hosts(tmp_path: Path, backend: str) -> None:
    cluster = clusters_in(tmp_path)
    program = tmp_path / "sum.py"
    program.write_text(SUM)
    done = cluster(
        "run --hosts 2 --rate 1gbit --launcher torchrun --ranks 2,1",
        *(sys.executable, str(program), backend),
    )
    assert done.ok, done.describe_failure()
    assert sorted(done.stdout.splitlines()) == [
        "h1 0 6.0 6.0",
        "h1 1 6.0 6.0",
        "h2 2 6.0 6.0",
    ]
    assert cluster.all_ended()
