# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends every kind of call that waits, at once, with KeyboardInterrupt.

One job makes each call on a communicator of its own, on rank 0 alone. A thread of that
rank sends SIGINT once the rank is known to wait, by what it tells the ranks of its
node. The limit of each wait is far away, so a call ends by the signal or not at all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from commrt.launch.mpiexec import child_environment

DEADLINE_S = 300.0
LATE_S = 30.0
"""Beside busy processes a thread gets a core late; the limit of the waits is 600 s."""
PROGRAM = """
import json, os, signal, sys, threading, time
import numpy as np
import commrt
from commrt.comm import core_of
from commrt.devices import DeviceArray, ThreadDevice

world_comm = commrt.init()
world_core = core_of(world_comm)
rank, world = world_comm.rank, world_core.world
x, long = np.ones(5), np.ones(300_001)
small = np.ones(3, np.float32)

def begun(comm):
    return comm.allreduce(x.copy(), nonblocking=True)

def in_fused(comm):
    with comm.fused():
        request = comm.allreduce(x.copy(), nonblocking=True)
    request.wait()

def shrunk(comm):
    comm.revoke()
    comm.shrink()

def on_a_device(comm):
    device = ThreadDevice()
    array = DeviceArray(device, 5, np.float32)
    request = comm.allreduce(array, nonblocking=True)
    request.synchronize()

calls = {
    "allreduce": lambda comm: comm.allreduce(x.copy()),
    "long allreduce": lambda comm: comm.allreduce(long.copy()),
    "ring": lambda comm: comm.allreduce(long.copy(), algorithm="shm/ring"),
    "barrier": lambda comm: comm.barrier(),
    "bcast": lambda comm: comm.bcast(x.copy(), root=1),
    "alltoallv": lambda comm: comm.alltoallv(np.ones(2), send_counts=[1, 1]),
    "wait": lambda comm: begun(comm).wait(),
    "wait_any": lambda comm: commrt.wait_any([begun(comm)]),
    "wait_all": lambda comm: commrt.wait_all([begun(comm), begun(comm)]),
    "bound": lambda comm: comm.plan.allreduce(x.copy())(),
    "fused": in_fused,
    "recv": lambda comm: comm.recv(np.empty(3), source=1),
    "recv from anyone": lambda comm: comm.recv(np.empty(3)),
    "long send": lambda comm: comm.send(long, dest=1),
    "sendrecv": lambda comm: comm.sendrecv(x, dest=1, source=1, out=np.empty(5)),
    "probe": lambda comm: comm.probe(1),
    "split": lambda comm: comm.split(0),
    "dup": lambda comm: comm.dup(),
    "create_group": lambda comm: comm.create_group([0, 1]),
    "cart": lambda comm: comm.cart([2]),
    "empty": lambda comm: comm.empty(100),
    "object": lambda comm: comm.allgather_object([rank]),
    "recv_object": lambda comm: comm.recv_object(source=1),
    "sparse": lambda comm: comm.sparse_allreduce(
        (np.array([1]), np.ones(1, np.float32), (9,)), result="sparse"
    ),
    "agree": lambda comm: comm.agree(1),
    "shrink": shrunk,
    "on a device": on_a_device,
}
grids = {
    "halo": lambda grid: grid.halo_exchange(np.ones(6), width=1),
    "neighbors": lambda grid: grid.neighbor_allgather(x.copy()),
}

def interrupted(call):
    # Return what ended the call, and how long after the signal.
    sent, over = [], threading.Event()

    def watch():
        while not over.is_set():
            if world_core.rank_states()[0].state == "waiting":
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    ended = "returned"
    try:
        call()
    except KeyboardInterrupt:
        ended = "KeyboardInterrupt"
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    after = time.monotonic() - sent[0] if sent else -1.0
    over.set()
    watcher.join()
    return [ended, after]

said = {}
chosen = sys.argv[1:]
for name in chosen:
    comm = world_comm.cart([2]) if name in grids else world_comm.dup()
    call = grids[name] if name in grids else calls[name]
    world.meet([0, 1], f"begin {name}")
    if rank == 0:
        said[name] = interrupted(lambda: call(comm))
    world.meet([0, 1], f"end {name}")
if rank == 0:
    # The communicator of all ranks was in none of these calls.
    said["after"] = [float(world_comm.allreduce(np.ones(1))[0]), 0.0]
    print(json.dumps(said), flush=True)
else:
    world_comm.allreduce(np.ones(1))
world.meet([0, 1], "printed")
os._exit(0)  # what was given up stays in flight: nobody is to wait for it
"""
CALLS = re.findall(r'^    "([a-z_ ]+)": (?:lambda|\w+,)', PROGRAM, re.MULTILINE)


def run_program(folder: Path, program: str, words: list[str]) -> str:
    """Return what two ranks print."""
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "commrt.run", "-n", "2"),
            *(str(folder / "program.py"), *words),
        ],
        env=child_environment(sys.executable),
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_call_that_waits_ends_by_ctrl_c(tmp_path: Path) -> None:
    said: dict[str, list[Any]] = json.loads(run_program(tmp_path, PROGRAM, CALLS))
    assert said.pop("after")[0] == 2.0
    assert [*said] == CALLS
    wrong = {name: how for name, how in said.items() if how[0] != "KeyboardInterrupt"}
    assert wrong == {}
    assert {name: how for name, how in said.items() if not 0 <= how[1] < LATE_S} == {}


INIT = """
import os, signal, sys, threading, time
from pathlib import Path
import commrt

over = Path(__file__).with_name("over")
if os.environ["RANK"] == "1":
    while not over.exists():  # it calls nothing
        time.sleep(0.001)
    os._exit(0)
main = threading.main_thread().ident

def waits():
    frame = sys._current_frames()[main]
    while frame is not None and frame.f_code.co_name != "poll_until":
        frame = frame.f_back
    return frame is not None

def interrupt():
    while not waits():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    commrt.init()
    print("returned", flush=True)
except KeyboardInterrupt:
    print("KeyboardInterrupt", flush=True)
over.touch()
os._exit(0)
"""


def test_init_ends_by_ctrl_c(tmp_path: Path) -> None:
    assert run_program(tmp_path, INIT, []) == "KeyboardInterrupt\n"
