# SPDX-License-Identifier: Apache-2.0
"""Logs and dumps that cannot be written: one line says so, and the job goes on.

A limit for the size of files stands for a full disk: a write ends early, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from commrt.launch.mpiexec import child_environment
from commrt.trace.job import load

DEADLINE_S = 300.0
PROGRAM = """
import resource, sys
import numpy as np
import commrt
from commrt.errors import MismatchError

comm = commrt.init()
for _ in range(10):
    comm.allreduce(np.ones(5))
comm.barrier()
if comm.rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
if "mismatch" in sys.argv:
    try:
        comm.allreduce(np.ones(5), op="max" if comm.rank == 1 else "sum")
    except MismatchError as error:
        assert "op='max'" in str(error), error
        sys.stdout.write("mismatch\\n")
else:
    sys.stdout.write(f"{comm.allreduce(np.ones(5))[4]}\\n")
"""


def run(variable: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "commrt.run", "-n", "3"]
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    return subprocess.run(
        [*command, str(program), *words],
        env={**child_environment(sys.executable), variable: str(folder)},
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_log_that_finds_no_room_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    done = run("COMMRT_TRACE", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3.0"] * 3
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"commrt: logs are not written to {folder}: ")
    assert line.endswith("-rank1.jsonl'")
    logs = load([folder]).logs
    assert [log.rank for log in logs] == [0, 2]
    assert [len(log.operations) for log in logs] == [12, 12]


def test_a_dump_that_finds_no_room_leaves_the_error_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    done = run("COMMRT_DUMP", folder, "mismatch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mismatch"] * 3
    (line,) = (one for one in done.stderr.splitlines() if "dump" in one)
    assert line.startswith("commrt: no dump is written to ")
    assert line.endswith("-rank1.json: File too large")
    assert not [path for path in folder.iterdir() if "rank1" in path.name]
    assert [path for path in folder.iterdir() if "rank0" in path.name]
