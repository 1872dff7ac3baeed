# SPDX-License-Identifier: Apache-2.0
"""Ranks of mpiexec on hosts find whether MPI or TCP is quicker, and all use that."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_commands import ClusterCommands

TIMED = r"8 B and 64 KiB, to and fro, take \d+ and \d+ us by TCP, \d+ and \d+ us by MPI"
WHO_CARRIES = """\
import errno, json, os, socket, sys
from unittest import mock
import numpy as np
import commrt
from commrt.job import between_nodes
from commrt.tcp import beside_mpi, connecting
fault = sys.argv[1] if socket.gethostname() == "h2" else ""
if fault == "cannot listen":
    denied = OSError(errno.EPERM, os.strerror(errno.EPERM))
    mock.patch.object(socket, "create_server", side_effect=denied).start()
if fault == "never connects":
    of_all = connecting._Connecting
    mock.patch.object(of_all, "advance", lambda self: False).start()
if fault == "loses messages":
    never = lambda self, nbytes: lambda: False
    mock.patch.object(beside_mpi._BySocket, "receive", never).start()
if sys.argv[1] in ("never connects", "loses messages"):
    between_nodes._PATIENCE_S = 0.5
comm = commrt.init()
x = np.full(30_001, comm.rank + 1.0)
comm.allreduce(x)
out = np.empty(3)
comm.sendrecv(
    np.full(3, float(comm.rank)),
    dest=(comm.rank + 1) % comm.size,
    out=out,
    source=(comm.rank - 1) % comm.size,
)
found = comm.explain("allreduce", 1 << 20)
why = [
    [each.candidate.backend, each.reason]
    for each in found.rejected
    if each.candidate.algorithm == "*"
]
names = {each.name for each in comm.candidates("allreduce", 8)} - {"mpi/native"}
by = sorted({name.partition("/")[0] for name in names})
line = json.dumps([comm.rank, x.min(), x.max(), out.tolist(), by, why])
os.write(1, line.encode() + b"\\n")
"""


def who_carries(
    cluster: ClusterCommands, folder: Path, hosts: str, fault: str = ""
) -> list[Any]:
    """Return the backend that runs schedules, which does not, and why."""
    program = folder / "who_carries.py"
    program.write_text(WHO_CARRIES)
    done = cluster(
        f"run {hosts} --rate 1gbit --launcher mpiexec",
        *(sys.executable, str(program), fault),
    )
    assert done.ok, done.describe_failure()
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    size = len(said)
    total = size * (size + 1) / 2
    for rank, low, high, came, *_ in said:
        assert (low, high) == (total, total)
        assert came == [float((rank - 1) % size)] * 3
    verdicts = [each[4:] for each in said]
    assert verdicts == [verdicts[0]] * size
    [by], [[other, why]] = verdicts[0]
    return [by, other, why]


@pytest.mark.whole
def test_all_ranks_use_what_was_quicker(
    cluster: ClusterCommands, tmp_path: Path
) -> None:
    found = who_carries(cluster, tmp_path, "--hosts 3 --ranks 2,1,1")
    assert sorted(found[:2]) == ["mpi", "tcp"]
    assert re.fullmatch(TIMED, found[2]) or found[2].startswith("its round trip is ")
    assert cluster.all_ended()


@pytest.mark.full(sample=1)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("cannot listen", r"rank 1 cannot listen at [\d.]+: Operation not permitted"),
        ("loses messages", r"rank [01]: rank [01], of another node, has not answered"),
        ("never connects", r"rank [01] at [\d.]+: no connection with ranks \[[01]\]"),
    ],
)
def test_mpi_carries_where_nobody_can_connect(
    cluster: ClusterCommands, tmp_path: Path, fault: str, why: str
) -> None:
    by, other, said = who_carries(cluster, tmp_path, "--hosts 2", fault)
    assert (by, other) == ("mpi", "tcp")
    assert re.match(why, said)
