# SPDX-License-Identifier: Apache-2.0
"""One rank after another is killed while all others wait for it; they shrink at once.

The first rank that notices ends the communicator for all. The others may hear of that
before the kernel tells them of the death: they name who has died all the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commrt.launch.mpiexec import child_environment

DEADLINE_S = 300.0
RANKS = 6
PROGRAM = """
import json, os, signal, sys
import numpy as np
import commrt
from commrt.errors import CommError

what = sys.argv[1]
comm = commrt.init()
first = comm.rank

calls = {
    "recv": lambda comm, dies: comm.recv(np.ones(5), source=dies),
    "recv from anyone": lambda comm, dies: comm.recv(np.ones(5)),
    "allreduce": lambda comm, dies: comm.allreduce(np.ones(5)),
    "split": lambda comm, dies: comm.split(0),
}
for dies in range(comm.size - 1, 0, -1):
    waits_in = comm.dup() if what.startswith("child ") else comm
    if first == dies:
        for _ in range(dies):  # the others wait by then, or are about to
            comm.recv(np.ones(1), tag=7)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.send(np.ones(1), dest=dies, tag=7)
    try:
        calls[what.removeprefix("child ")](waits_in, dies)
        error = None
    except CommError as raised:
        error = raised
    print(json.dumps([dies, first, type(error).__name__, str(error)]), flush=True)
    old, comm = comm, comm.shrink()
    old.free()
"""
WAITS = re.findall(r'^    "([a-z ]+)": lambda', PROGRAM, re.MULTILINE)


@pytest.mark.parametrize("nodes", [str(RANKS), "2,2,2", "1,5"])
@pytest.mark.parametrize("where", ["", "child "])
@pytest.mark.parametrize("what", WAITS)
def test_each_survivor_names_each_death(
    tmp_path: Path, what: str, where: str, nodes: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-n", str(RANKS), "--keep-going", str(tmp_path / "program.py")]
    done = subprocess.run(
        [sys.executable, "-m", "commrt.run", *words, where + what],
        env={**child_environment(sys.executable), "COMMRT_NODES": nodes},
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    deaths = range(1, RANKS)
    assert sorted(one[:2] for one in said) == [[d, r] for d in deaths for r in range(d)]
    for dies, _, kind, text in said:
        assert kind == "PeerFailedError", text
        assert re.search(rf"rank {dies}\b.*process \d+ on \S+ has ended", text), text
