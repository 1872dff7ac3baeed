# SPDX-License-Identifier: Apache-2.0
"""Processes that do not run: others name one, and it looks again before it raises.

A rank stops itself by SIGSTOP once the others are known to see it as waiting, and
another rank lets it go on. Nothing depends on how long that takes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commrt.launch.mpiexec import child_environment

DEADLINE_S = 300.0
PROGRAM = """
import json, os, signal, sys, time
import numpy as np
import commrt
from commrt.comm import core_of
from commrt.errors import TimeoutError_

what = sys.argv[1]
comm = commrt.init()
rank, last = comm.rank, comm.size - 1
others = [r for r in range(comm.size) if r != last]
x = np.ones(5)
comm.allreduce(x.copy())
core = core_of(comm)
world = core.world

def step_until(there):
    while not there():
        world.engine.step()

def let_go():
    os.kill(int(world.liveness.native.name(last).split()[1]), signal.SIGCONT)

def named_when_stopped():
    if rank == last:
        os.kill(os.getpid(), signal.SIGSTOP)
        return [float(comm.allreduce(x.copy())[0])]
    request = comm.allreduce(x.copy(), nonblocking=True)
    state = None
    while state is None or state.state != "stopped":
        try:
            request.wait(timeout_s=0.05)
        except TimeoutError_ as error:
            state, text = error.ranks[last], str(error)
    world.meet(others, "named")
    if rank == 0:
        let_go()
    said = [state.last, state.last_seq, f"rank {last}: stopped" in text]
    return [*said, float(request.wait()[0])]

def stopped_in_a_wait(arrives):
    # The last rank's deadline passes while it is stopped.
    if rank == last:
        try:
            said = [float(comm.allreduce(x.copy(), timeout_s=LIMIT_S)[0])]
            world.meet(range(comm.size), "after")
        except TimeoutError_ as error:
            said = [str(error), error.ranks[last].state]
            world.meet(range(comm.size), "after")
            error.request.wait()
        return said
    step_until(lambda: core.rank_states()[last].state == "waiting")
    world.meet(others, "waits")
    if rank == 0:
        os.kill(int(world.liveness.native.name(last).split()[1]), signal.SIGSTOP)
        step_until(lambda: core.rank_states()[last].state == "stopped")
    world.meet(others, "stopped")
    begun = comm.allreduce(x.copy(), nonblocking=True) if arrives else None
    if rank == 0:
        over = time.monotonic() + 2 * LIMIT_S
        step_until(lambda: time.monotonic() > over)
        let_go()
    if begun is None:
        world.meet(range(comm.size), "after")
        begun = comm.allreduce(x.copy(), nonblocking=True)
        return [float(begun.wait()[0])]
    said = [float(begun.wait()[0])]
    world.meet(range(comm.size), "after")
    return said

LIMIT_S = 2.5
if what == "named":
    said = named_when_stopped()
else:
    said = stopped_in_a_wait(what == "arrives")
sys.stdout.write(json.dumps([rank, said]) + "\\n")
"""


def run(folder: Path, what: str, ranks: int) -> list[Any]:
    """Return what each rank has said."""
    (folder / "program.py").write_text(PROGRAM)
    words = ["-n", str(ranks), str(folder / "program.py"), what]
    done = subprocess.run(
        [sys.executable, "-m", "commrt.run", *words],
        env=child_environment(sys.executable),
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [said for _, said in sorted(map(json.loads, done.stdout.splitlines()))]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_others_name_a_stopped_rank_as_stopped(tmp_path: Path, ranks: int) -> None:
    said = run(tmp_path, "named", ranks)
    assert said[:-1] == [["allreduce", 0, True, float(ranks)]] * (ranks - 1)
    assert said[-1] == [float(ranks)]


def test_what_came_while_a_rank_was_stopped_is_no_timeout(tmp_path: Path) -> None:
    assert run(tmp_path, "arrives", 3) == [[3.0]] * 3


def test_a_rank_that_was_stopped_says_so_where_it_waits_in_vain(tmp_path: Path) -> None:
    *others, (text, state) = run(tmp_path, "in vain", 2)
    assert others == [[2.0]]
    told = re.search(
        r"within 2\.5 s: this process itself did not run for (\d+) s", text
    )
    assert told is not None, text
    assert int(told[1]) >= 4
    assert state == "waiting"
