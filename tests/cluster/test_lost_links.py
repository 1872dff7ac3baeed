# SPDX-License-Identifier: Apache-2.0
"""Ranks of hosts whose link goes down: each one raises, and each process ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster_commands import ClusterCommands

from commrt.bootstrap.base import poll_until

LIMIT_S = 300
LOSES_A_LINK = """\
import subprocess, sys
from pathlib import Path
import numpy as np
import commrt
comm = commrt.init()
x = np.ones(100_000)
comm.allreduce(x)
if comm.rank == 1:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
try:
    comm.allreduce(x)
except commrt.errors.CommError as error:
    Path(sys.argv[2], f"rank{comm.rank}").write_text(type(error).__name__)
    if sys.argv[1] == "raises":
        raise
    if sys.argv[1] == "exits":
        sys.exit(3)
"""


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("carrier", ["mpi", "tcp"])
@pytest.mark.parametrize("how", ["exits", "raises", "goes on"])
def test_ranks_end_after_a_lost_link(
    cluster: ClusterCommands, tmp_path: Path, how: str, carrier: str
) -> None:
    program = tmp_path / "loses_a_link.py"
    program.write_text(LOSES_A_LINK)
    assert cluster("up demo --hosts 2").ok
    running = cluster.start(
        "run demo --launcher mpiexec",
        *("env", "COMMRT_TIMEOUT_S=3", f"COMMRT_CARRIER={carrier}"),
        *(sys.executable, str(program), how, str(tmp_path)),
    )
    assert running.stdout is not None
    with running, running.stdout:
        said = [tmp_path / "rank0", tmp_path / "rank1"]
        assert poll_until(lambda: all(one.exists() for one in said), LIMIT_S)
        assert poll_until(lambda: not ranks_of(cluster, program), LIMIT_S)
        # The launcher itself may wait for the other host, for ever.
        running.kill()
    assert {one.read_text() for one in said} <= {"TimeoutError_", "PeerFailedError"}
    assert cluster("down demo").ok
    assert poll_until(cluster.all_ended, LIMIT_S)


def ranks_of(cluster: ClusterCommands, program: Path) -> list[int]:
    """Return the processes that run a program, without launchers that name it."""
    found = []
    for pid in cluster.processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [sys.executable.encode(), str(program).encode()]:
            found.append(pid)
    return found
