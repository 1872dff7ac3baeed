# SPDX-License-Identifier: Apache-2.0
"""gloo between hosts whose own names other hosts do not reach."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster_commands import ClusterCommands, clusters_in

SUM = """\
import os, socket
import numpy as np
import commrt
comm = commrt.init()
x = np.full(1001, comm.rank + 1.0)
comm.allreduce(x)
if comm.rank != 1:
    comm.create_group([0, 2]).allreduce(np.ones(3), algorithm="native")
os.write(1, f"{socket.gethostname()} {x.min()} {x.max()}\\n".encode())
"""
NAMED_LOOPBACK = """\
{ echo 127.0.0.1 localhost; echo 127.0.1.1 $(hostname); \
grep -v " $(hostname)\\$" /etc/hosts | grep 10.77; } > /dev/shm/hosts
cat /dev/shm/hosts > /etc/hosts
"""


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterCommands:
    return clusters_in(tmp_path)


@pytest.mark.parametrize("rendezvous", ["10.77.0.1", "h1"])
def test_hosts_that_call_themselves_127_0_1_1_reach_each_other(
    cluster: ClusterCommands, tmp_path: Path, rendezvous: str
) -> None:
    program = tmp_path / "sum.py"
    program.write_text(SUM)
    assert cluster("up demo --hosts 2").ok
    assert cluster("run demo --all", "sh", "-c", NAMED_LOOPBACK).ok
    done = cluster(
        "run demo --launcher torchrun --ranks 2,1",
        *("env", "-u", "GLOO_SOCKET_IFNAME", f"MASTER_ADDR={rendezvous}"),
        *(sys.executable, str(program)),
    )
    assert cluster("down demo").ok
    assert done.ok, done.describe_failure()
    assert sorted(done.stdout.splitlines()) == [
        "h1 6.0 6.0",
        "h1 6.0 6.0",
        "h2 6.0 6.0",
    ]
    assert cluster.all_ended()
