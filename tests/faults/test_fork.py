# SPDX-License-Identifier: Apache-2.0
"""A process that forks after init, as data loaders do: the child cannot communicate."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import core_of
from commrt.errors import ClosedError
from commrt.launch.mpiexec import child_environment

COMM: list[Any] = []


def square(number: int) -> int:
    """What a worker computes; it also makes sure that it cannot communicate."""
    with pytest.raises(ClosedError, match="from which this one was forked"):
        COMM[0].allreduce(np.ones(3))
    return number * number


def loads_data() -> list[Any]:
    comm = commrt.init()
    COMM.append(comm)
    comm.allreduce(np.ones(3))
    pending = comm.allreduce(np.full(100_000, 1.0), nonblocking=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map_async(square, range(10))
        total = comm.allreduce(np.full(3, 2.0))
        numbers = squares.get(timeout=300)
    return [numbers, float(total[0]), float(pending.wait()[-1]), core_of(comm).next_seq]


@pytest.mark.parametrize("progress", ["on", "off"])
def test_forked_workers_leave_the_parent_alone(mpirun: Any, progress: str) -> None:
    got = mpirun(2, loads_data, env={"COMMRT_PROGRESS": progress})
    squares = [number * number for number in range(10)]
    assert got == [[squares, 4.0, 2.0, 3]] * 2


# The child ends as Python programs do: through atexit, __del__ and static destructors.
ENDS_NORMALLY = """
import os, sys
import numpy as np
import commrt
from commrt.local import LocalRanks
from commrt.errors import ClosedError

comm = commrt.init()
comm.allreduce(np.ones(3))
ranks = LocalRanks(2)
pending = ranks.comms[0].allreduce(np.ones(3), nonblocking=True)
pid = os.fork()
if pid == 0:
    refused = 0
    for call in (
        lambda: comm.allreduce(np.ones(3)),
        lambda: comm.barrier(),
        lambda: comm.send(np.ones(3), dest=0),
        lambda: comm.dup(),
        lambda: comm.stats(),
        lambda: commrt.synchronize(),
        lambda: pending.wait(),
        lambda: pending.test(),
        lambda: ranks.comms[1].allreduce(np.ones(3)),
    ):
        try:
            call()
        except ClosedError:
            refused += 1
    comm.free()
    ranks.comms[0].free()
    del pending, ranks
    sys.exit(refused)
_, status = os.waitpid(pid, 0)
print("refused", os.waitstatus_to_exitcode(status))
other = ranks.comms[1].allreduce(np.ones(3), nonblocking=True)
while not (pending.test() and other.test()):
    pass
print("parent", pending.wait()[0], comm.allreduce(np.ones(3))[0])
ranks.free()
"""


@pytest.mark.parametrize("progress", ["on", "off"])
def test_a_forked_child_may_end_normally(progress: str) -> None:
    env = {**child_environment(sys.executable), "COMMRT_PROGRESS": progress}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENDS_NORMALLY],
        env=env,
        cwd=os.sep,  # the repository's source tree would hide an installed wheel
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "refused 9\nparent 2.0 1.0\n", done.stderr
    assert done.returncode == 0


def forks_an_exec() -> list[Any]:
    comm = commrt.init()
    said = subprocess.run(
        [sys.executable, "-c", "print(6 * 7)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [said.stdout.strip(), float(comm.allreduce(np.ones(3))[0]), os.getpid() > 0]


def test_other_programs_can_be_started(mpirun: Any) -> None:
    assert mpirun(2, forks_an_exec) == [["42", 2.0, True]] * 2
