# SPDX-License-Identifier: Apache-2.0
"""``commrt.run --hosts`` on hosts of a cluster, without MPI and without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster_commands import ClusterCommands

from commrt.cluster.host import AGENT
from commrt.launch.mpiexec import Completed

SUMS = """\
import os, socket, sys
import numpy as np
import commrt
comm = commrt.init()
x = np.full(100_001, comm.rank + 1.0)
comm.allreduce(x)
part = comm.split(comm.rank % 2)
runs = comm.explain("allreduce", 1 << 20).choice.candidate.backend
libraries = sorted({"torch", "mpi4py"} & {*sys.modules})
line = f"{socket.gethostname()} {comm.rank} {x.min()} {x.max()} {part.size} {runs}"
os.write(1, f"{line} {libraries}\\n".encode())
"""
ONE_DIES = """\
import os, signal
import numpy as np
import commrt
comm = commrt.init()
x = np.ones(1001)
comm.allreduce(x)
if comm.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.allreduce(x)
    comm.allreduce(x)
except commrt.errors.PeerFailedError as error:
    said = "rank 2" in str(error) and "h2" in str(error)
    os.write(1, f"{comm.rank} {said}\\n".encode())
"""


def run_on(
    cluster: ClusterCommands, folder: Path, text: str, *options: str
) -> Completed:
    """Run a program on two hosts, by a launcher on the first one."""
    program = folder / "program.py"
    program.write_text(text)
    words = [sys.executable, "-m", "commrt.run", "--hosts", "h1:2,h2", "--ssh", AGENT]
    return cluster("run --hosts 2 --rate 1gbit --on h1", *words, *options, str(program))


@pytest.mark.parametrize("interface", [[], ["--interface", "eth0"]])
def test_ranks_on_hosts_sum_without_libraries(
    cluster: ClusterCommands, tmp_path: Path, interface: list[str]
) -> None:
    done = run_on(cluster, tmp_path, SUMS, *interface)
    assert done.ok, done.describe_failure()
    assert sorted(done.stdout.splitlines()) == [
        "h1 0 6.0 6.0 2 tcp []",
        "h1 1 6.0 6.0 1 tcp []",
        "h2 2 6.0 6.0 2 tcp []",
    ]
    assert cluster.all_ended()


def test_who_dies_on_another_host_is_named(
    cluster: ClusterCommands, tmp_path: Path
) -> None:
    done = run_on(cluster, tmp_path, ONE_DIES, "--keep-going")
    assert done.ok, done.describe_failure()
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 True"]
    assert "rank 2 of 3 (process" in done.stderr
    assert "on h2) was killed by signal 9 (SIGKILL); the others go on" in done.stderr
    assert cluster.all_ended()
