# SPDX-License-Identifier: Apache-2.0
"""Ranks that MPI started send between nodes by MPI, or by connections of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import UsageError
from commrt.select.facts import Candidate
from commrt.select.fingerprint import this_machine
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.select.write import dump

NODES = ("1,1", "2,1", "1,1,1", "2,2,1")
SIZES = (0, 1, 5, 30_000)


def ranks_of(nodes: str) -> int:
    return sum(map(int, nodes.split(",")))


def messages_and_sums() -> list[Any]:
    """Exchange vectors of several lengths; return who carries, and what is wrong."""
    comm = commrt.init()
    size, rank = comm.size, comm.rank
    wrong = []
    for count in SIZES:
        x = np.arange(count, dtype=np.float64) + rank
        total = np.arange(count) * size + size * (size - 1) / 2
        begun = [comm.allreduce(x.copy(), nonblocking=True) for _ in range(3)]
        out = np.empty(count)
        comm.sendrecv(x, dest=(rank + 1) % size, out=out, source=(rank - 1) % size)
        sums = [each.wait() for each in begun]
        sums += [comm.allreduce(x.copy(), algorithm="mpi/native")]
        if not all(np.array_equal(each, total) for each in sums):
            wrong.append(f"sum of {count}")
        if not np.array_equal(out, np.arange(count) + (rank - 1) % size):
            wrong.append(f"message of {count}")
    why = [
        f"{each.candidate}: {each.reason}"
        for each in comm.explain("allreduce", 64).rejected
        if each.candidate.algorithm == "*"
    ]
    names = {each.name for each in comm.candidates("allreduce", 64)}
    by = sorted({name.partition("/")[0] for name in names - {"mpi/native"}})
    return [by, why, wrong]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(
    ("carrier", "by", "why"),
    [
        ("tcp", "tcp", "mpi/*: COMMRT_CARRIER=tcp"),
        ("mpi", "mpi", "tcp/*: COMMRT_CARRIER=mpi"),
        ("auto", "mpi", "tcp/*: the nodes are parts of one"),
    ],
)
def test_the_carrier_that_is_asked_for_carries(
    mpirun: Any, nodes: str, carrier: str, by: str, why: str
) -> None:
    env = {"COMMRT_NODES": nodes, "COMMRT_CARRIER": carrier}
    found = mpirun(ranks_of(nodes), messages_and_sums, env=env)
    assert found == [[[by], [why], []]] * ranks_of(nodes)


def test_on_one_node_nobody_carries(mpirun: Any) -> None:
    found = mpirun(2, messages_and_sums, env={"COMMRT_CARRIER": "tcp"})
    assert found == [[["shm"], [], []]] * 2


def test_gloo_carries_nothing_between_ranks_of_mpi(mpirun: Any) -> None:
    env = {"COMMRT_NODES": "1,1", "COMMRT_CARRIER": "gloo"}
    done = mpirun.failing(2, messages_and_sums, env=env)
    assert "BackendError: COMMRT_CARRIER=gloo needs a store" in done.stderr


def ask_for_schedules_of_mpi() -> str:
    comm = commrt.init()
    try:
        comm.allreduce(np.ones(3), algorithm="mpi/ring")
    except UsageError as error:
        return str(error)
    return ""


def test_schedules_of_mpi_are_refused_by_name_where_it_carries_nothing(
    mpirun: Any,
) -> None:
    env = {"COMMRT_NODES": "1,1", "COMMRT_CARRIER": "tcp"}
    for said in mpirun(2, ask_for_schedules_of_mpi, env=env):
        assert "asks for 'mpi/ring'" in said
        assert "did you mean 'tcp/ring'?" in said


def what_runs() -> str:
    return str(commrt.init().explain("allreduce", 64).choice.candidate.name)


@pytest.mark.parametrize("carrier", ["tcp", "mpi"])
@pytest.mark.parametrize("backend", ["tcp", "mpi"])
def test_rules_of_tables_hold_whoever_carries(
    mpirun: Any, tmp_path: Path, carrier: str, backend: str
) -> None:
    path = tmp_path / "table.yaml"
    rule = Rule("allreduce", Match(0, None, ranks=2), Candidate(backend, "ring"))
    path.write_text(dump(Table(this_machine(), (rule,))))
    env = {
        "COMMRT_NODES": "1,1",
        "COMMRT_CARRIER": carrier,
        "COMMRT_TABLE": str(path),
    }
    assert mpirun(2, what_runs, env=env) == [f"{carrier}/ring"] * 2
