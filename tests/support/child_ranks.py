# SPDX-License-Identifier: Apache-2.0
"""Processes that ranks start: what ``commrt.init`` makes of them, and of the job."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import commrt
from commrt.errors import UsageError
from commrt.launch.detect import detect

ASKS = "import child_ranks, json; print(json.dumps(child_ranks.world()))"
"""What a child runs."""
ALONE = [0, 1, 1.0]
"""What a world of one says; the fourth is its warning."""


def world() -> list[Any]:
    """Return rank, size and a sum of this process's world, and its warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            comm = commrt.init()
        except UsageError as error:
            return [str(error)]
    said = [str(each.message) for each in caught]
    of_world = [text for text in said if "is a world of one" in text]
    total = float(comm.allreduce(np.ones(1))[0])
    return [comm.rank, comm.size, total, *of_world]


def child(how: str) -> list[Any]:
    """Start a process in that way, and return what it says of its world."""
    if how in ("spawn", "forkserver", "fork"):
        # By the name that a worker can import; a rank's main program has another one.
        from child_ranks import world as there

        with multiprocessing.get_context(how).Pool(1) as pool:
            said: list[Any] = pool.apply(there)
        return said
    command = [sys.executable, "-c", ASKS]
    if how == "shell":
        command = ["bash", "-c", f'"{sys.executable}" -c "{ASKS}"; true']
    printed = output_of(command, close_fds=how != "inheriting")
    told: list[Any] = json.loads(printed.splitlines()[-1])
    return told


def output_of(command: list[str], *, close_fds: bool = True) -> str:
    """Return what a command prints, which has this process's variables."""
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        close_fds=close_fds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def family(first: str, after: str, mpi: bool, parents: list[int]) -> list[Any]:
    """Start children before ``init``, and after it, on some ranks; go on.

    Return the world of each child, and the sums of the job.
    """
    mine = detect().rank in parents
    if first and mpi:
        from mpi4py import MPI

        assert MPI.Is_initialized()
    elif first:
        from commrt import local  # the engine is here, and no rank has joined

        assert local
    said = [child(first)] if first and mine else []
    comm = commrt.init()
    sums = [float(comm.allreduce(np.ones(2))[0])]
    if after and mine:
        said.append(child(after))
    comm.barrier()
    sums.append(float(comm.allreduce(np.ones(2))[0]))
    return [said, sums]


def nested(command: list[str], init: bool) -> list[Any]:
    """Start a job within rank 0 of this one; return its ranks' worlds."""
    comm = commrt.init() if init else None
    printed = output_of(command) if detect().rank == 0 else ""
    total = 0.0
    if comm is not None:
        comm.barrier()
        total = float(comm.allreduce(np.ones(1))[0])
    inner = [json.loads(line) for line in printed.replace("][", "]\n[").splitlines()]
    return [sorted(inner), total]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(world()) + "\n")
