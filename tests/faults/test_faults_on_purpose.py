# SPDX-License-Identifier: Apache-2.0
"""COMMRT_CHAOS in processes: ranks that it kills or stops, and calls of a library."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import CommError
from commrt.launch.mpiexec import child_environment

DEADLINE_S = 300.0
PROGRAM = """
import sys
import numpy as np
import commrt
from commrt.errors import CommError

comm = commrt.init()
try:
    for step in range(8):
        assert (comm.allreduce(np.ones(1000)) == comm.size).all()
    print(f"rank {comm.rank}: right", flush=True)
except CommError as error:
    print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
    if len(sys.argv) > 1:
        left = comm.shrink()
        total = left.allreduce(np.ones(3))
        print(f"rank {comm.rank}: goes on as one of {total[0]:g}", flush=True)
"""


def start(
    tmp_path: Path, size: int, chaos: str, *arguments: str
) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "commrt.run", "--keep-going", "-n", str(size)]
    return subprocess.Popen(
        [*launcher, str(program), *arguments],
        env={**child_environment(sys.executable), "COMMRT_CHAOS": chaos},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_others_of_a_killed_rank_name_it_and_go_on(
    tmp_path: Path, size: int
) -> None:
    job = start(tmp_path, size, "7:kill@rank=1,op=allreduce,number=4", "shrink")
    out, err = job.communicate(timeout=DEADLINE_S)
    assert err.count("commrt chaos: rank 1: kill: allreduce #3 on world") == 1
    assert "killed by signal 9" in err
    failed = re.findall(r"rank (\d): PeerFailedError: .*rank 1 has died", out)
    assert sorted(map(int, failed)) == [r for r in range(size) if r != 1]
    assert out.count(f"goes on as one of {size - 1}") == size - 1


def test_a_stopped_rank_is_late_and_not_dead(tmp_path: Path) -> None:
    job = start(tmp_path, 3, "7:stop@rank=2,number=5")
    assert job.stderr is not None
    said = ""
    while "stop: allreduce #4" not in said:
        line = job.stderr.readline()
        assert line, said
        said += line
    stopped = wait_for_stopped(job.pid)
    os.kill(stopped, signal.SIGCONT)
    out, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0
    assert sorted(out.splitlines()) == [f"rank {rank}: right" for rank in range(3)]


def wait_for_stopped(launcher: int) -> int:
    """Return the process of the launcher's that is stopped, once one is."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    while True:
        for child in children.read_text().split():
            said = Path(f"/proc/{child}/stat").read_text()
            if said.rpartition(")")[2].split()[0] == "T":
                return int(child)
        os.sched_yield()


@pytest.mark.parametrize("chaos", ["x", "7:flail", "7:fail@rank=one"])
def test_a_wrong_value_ends_init_on_all_ranks(tmp_path: Path, chaos: str) -> None:
    job = start(tmp_path, 2, chaos)
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode != 0
    assert out == ""
    assert len(re.findall("^commrt.errors.UsageError: .*COMMRT_CHAOS", err, re.M)) == 2


def calls_of_the_library(number: int) -> list[str]:
    """Return what five collectives of the MPI library gave, or the error."""
    comm = commrt.init()
    comm.timeout_s = 5
    found = []
    for turn in range(5):
        x = np.full(number, comm.rank + turn)
        try:
            out = np.empty((comm.size, number), x.dtype)
            comm.allgather(x, out=out, algorithm="mpi/native")
            wrong = out ^ (np.arange(comm.size)[:, None] + turn)
            found.append(str(int(np.count_nonzero(wrong))))
        except CommError as error:
            found.append(type(error).__name__)
            break
    return found


@pytest.mark.parametrize(
    ("kind", "there", "elsewhere"),
    [
        ("fail", "BackendError", "RevokedError"),
        ("delay=0.2", "0", "0"),
        ("drop", "TimeoutError_", "TimeoutError_"),
        ("corrupt", "", "1"),
    ],
)
@pytest.mark.parametrize("nodes", ["", "1,1"])
def test_collectives_of_an_mpi_library(
    mpirun: Any, kind: str, there: str, elsewhere: str, nodes: str
) -> None:
    env = {"COMMRT_CHAOS": f"7:{kind}@rank=1,number=3"}
    if nodes:
        env["COMMRT_NODES"] = nodes
    found = mpirun(2, calls_of_the_library, env=env, number=1000)
    assert found[0][:2] == found[1][:2] == ["0", "0"]
    assert found[0][2] == elsewhere
    assert found[1][2] == there or not there
