# SPDX-License-Identifier: Apache-2.0
"""A process of the node ends: the other ranks learn it from the kernel, and say which.

Their deadline is far away (600 s), so each test ends by the notice or not at all.
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
import json, os, signal, sys
import numpy as np
import commrt
from commrt.comm import core_of
from commrt.errors import CommError, PeerFailedError

what, how, dies = sys.argv[1], sys.argv[2], int(sys.argv[3])
comm = commrt.init()
rank, size = comm.rank, comm.size
survivors = [r for r in range(size) if r != dies]
small, large = np.ones(5), np.ones(300_001)
comm.allreduce(small.copy())
world = core_of(comm).world

def die():
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(0)
    sys.exit(0)

# Each call waits for the rank that dies, which makes none of them.
calls = {
    "allreduce": lambda: comm.allreduce(small.copy()),
    "long allreduce": lambda: comm.allreduce(large.copy()),
    "nonblocking": lambda: begun(small).wait(),
    "tested": lambda: until_tested(begun(large)),
    "alltoallv": lambda: comm.alltoallv(np.ones(size), send_counts=[1] * size),
    "recv": lambda: comm.recv(np.empty(3), source=dies),
    "recv from anyone": lambda: comm.recv(np.empty(3)),
    "long send": lambda: comm.send(large, dest=dies),
    "sendrecv": lambda: comm.sendrecv(small, dest=dies, source=dies, out=np.empty(5)),
    "probe": lambda: comm.probe(dies),
    "split": lambda: comm.split(0),
    "dup": lambda: comm.dup(),
    "empty": lambda: comm.empty(100),
    "wait_any": lambda: commrt.wait_any([begun(small)]),
    "object": lambda: comm.allgather_object([rank]),
}

def begun(x):
    return comm.allreduce(x.copy(), nonblocking=True)

def until_tested(request):
    while not request.test():
        os.sched_yield()

def error_of(call):
    try:
        call()
    except CommError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]

if what == "last words":
    # All that the rank sent before it died arrives.
    if rank == dies:
        for peer in survivors:
            comm.send(np.full(7, 3.5), dest=peer)
        die()
    world.meet(survivors, "after")
    said = [comm.recv(np.empty(7), source=dies).tolist()]
    said.append(error_of(lambda: comm.recv(np.empty(7), source=dies))[0])
elif what == "half a message":
    if rank == dies:
        comm.send(large, dest=survivors[0], nonblocking=True)
        die()
    said = ["none", ""]
    if rank == survivors[0]:
        said = error_of(lambda: comm.recv(np.empty(large.size), source=dies))
elif what == "part":
    # A communicator without the rank goes on; one with it does not.
    part = comm.split(int(rank == dies))
    if rank == dies:
        for one in survivors:  # they have left split()
            comm.recv(np.empty(1), source=one)
        die()
    comm.send(np.ones(1), dest=dies)
    first = error_of(lambda: comm.allreduce(small.copy()))
    said = [first[0], float(part.allreduce(np.ones(3))[0])]
    made = comm.create_group(survivors)
    said.append(float(made.allreduce(np.ones(3))[0]))
elif what == "stopped":
    if rank == dies:
        os.kill(os.getpid(), signal.SIGSTOP)
        said = ["none", float(comm.allreduce(small.copy())[0])]
    else:
        request = comm.allreduce(small.copy(), nonblocking=True)
        try:
            request.wait(timeout_s=1.0)
            said = ["in time"]
        except CommError as error:
            said = [type(error).__name__]
        name = world.liveness.native.name(dies)
        world.meet(survivors, "given up")
        if rank == survivors[0]:
            os.kill(int(name.split()[1]), signal.SIGCONT)
        said.append(float(request.wait()[0]))
else:
    if rank == dies:
        die()
    said = [error_of(calls[what]), error_of(lambda: comm.allreduce(small.copy()))]
sys.stdout.write(json.dumps([rank, said]) + "\\n")
"""


def run(folder: Path, what: str, how: str, *, ranks: int, dies: int) -> dict[int, Any]:
    """Return what each rank has said; the launcher ends none of them."""
    (folder / "program.py").write_text(PROGRAM)
    words = ["-n", str(ranks), "--keep-going", str(folder / "program.py")]
    done = subprocess.run(
        [sys.executable, "-m", "commrt.run", *words, what, how, str(dies)],
        env=child_environment(sys.executable),
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


CALLS = re.findall(r'^    "([a-z _]+)": lambda', PROGRAM, re.MULTILINE)


@pytest.mark.parametrize("what", CALLS)
def test_every_wait_names_a_rank_that_was_killed(tmp_path: Path, what: str) -> None:
    said = run(tmp_path, what, "kill", ranks=3, dies=1)
    assert sorted(said) == [0, 2]
    for first, later in said.values():
        assert first[0] == "PeerFailedError", first
        assert re.search(r"rank 1\b.*process \d+ on \S+ has ended", first[1]), first
        assert later[0] == "PeerFailedError", later


@pytest.mark.parametrize("how", ["exit", "leave"])
@pytest.mark.parametrize("what", ["allreduce", "recv", "split"])
def test_a_rank_that_ends_by_itself_is_named(
    tmp_path: Path, what: str, how: str
) -> None:
    said = run(tmp_path, what, how, ranks=3, dies=2)
    words = "has left" if how == "leave" else "has died"
    for first, later in said.values():
        assert first[0] == later[0] == "PeerFailedError"
        assert what == "split" or f"rank 2 {words}" in first[1], first


@pytest.mark.parametrize("how", ["kill", "exit", "leave"])
def test_what_was_sent_before_arrives(tmp_path: Path, how: str) -> None:
    said = run(tmp_path, "last words", how, ranks=3, dies=0)
    assert said == {rank: [[3.5] * 7, "PeerFailedError"] for rank in (1, 2)}


def test_a_message_that_came_in_part_is_none(tmp_path: Path) -> None:
    said = run(tmp_path, "half a message", "kill", ranks=2, dies=1)
    assert said[0][0] == "PeerFailedError"


@pytest.mark.parametrize("ranks", [3, 4])
def test_others_go_on_without_the_rank(tmp_path: Path, ranks: int) -> None:
    said = run(tmp_path, "part", "kill", ranks=ranks, dies=1)
    left = float(ranks - 1)
    assert said == {
        rank: ["PeerFailedError", left, left] for rank in range(ranks) if rank != 1
    }


def test_a_stopped_rank_is_late_and_not_dead(tmp_path: Path) -> None:
    said = run(tmp_path, "stopped", "", ranks=3, dies=2)
    assert said == {
        0: ["TimeoutError_", 3.0],
        1: ["TimeoutError_", 3.0],
        2: ["none", 3.0],
    }
