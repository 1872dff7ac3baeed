# SPDX-License-Identifier: Apache-2.0
"""torch's methods need no ProcessGroup: a Backend of a later torch can have them, too.

torch 2.13 lets no class of Python derive from Backend. A stand-in takes its place here,
with what torch's later ``PyBackend.hpp`` asks a Backend for, by these names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ASKED = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather"),
    *("all_gather_single", "allgather_coalesced", "all_gather_single_coalesced"),
    *("gather", "scatter", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "all_to_all_single", "alltoall", "send"),
    *("recv", "recv_anysource", "barrier"),
)
PROGRAM = """
import json, sys
import torch
import commrt
from commrt.torch.calls import Calls
from commrt.torch.group_methods import Collectives
from commrt.torch.messages import Messages

assert "commrt.torch.process_group" not in sys.modules

class Backend:
    "What a later torch lets Python derive from."
    def __init__(self, rank, size):
        self.at = rank, size

class CommrtBackend(Collectives, Messages, Backend):
    def __init__(self, comm):
        Backend.__init__(self, comm.rank, comm.size)
        self._calls = Calls(comm, None)
    allreduce_sparse = Collectives.allreduce
    def start_coalescing(self):
        self._calls.start_batch()
    def end_coalescing(self):
        return self._calls.end_batch()

b = CommrtBackend(commrt.init())
x, y = torch.arange(3.0), torch.zeros(3)
out = {}
for work in (
    b.broadcast([x], 0), b.allreduce([x]), b.allreduce_coalesced([x]), b.reduce([x]),
    b.allgather([[y]], [x]), b.all_gather_single(y, x),
    b.allgather_coalesced([[y]], [x]), b.all_gather_single_coalesced([y], [x]),
    b.gather([[y]], [x]), b.scatter([y], [[x]]),
    b.reduce_scatter([y], [[x]]), b.reduce_scatter_single(y, x),
    b.reduce_scatter_single_coalesced([y], [x]), b.all_to_all_single(y, x, [], []),
    b.alltoall([y], [x]), b.barrier(), b.allreduce_sparse([x.to_sparse()]),
):
    if work is not None:
        work.wait()
for work in (
    b.recv_anysource([y], 3), b.send([x], 0, 3),
    b.recv([x], 0, 4), b.send([y], 0, 4),
):
    work.wait()
b.start_coalescing()
assert b.allreduce([x]) is None
b.end_coalescing().wait()
missing = [name for name in json.loads(sys.argv[1]) if not hasattr(CommrtBackend, name)]
print(json.dumps([x.tolist(), y.tolist(), missing]))
"""


def test_a_backend_of_a_later_torch_takes_the_same_methods(tmp_path: Path) -> None:
    from commrt.launch.mpiexec import child_environment

    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(file), json.dumps(ASKED)],
        capture_output=True,
        text=True,
        timeout=150,
        env=child_environment(sys.executable),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], []]
