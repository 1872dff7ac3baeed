# SPDX-License-Identifier: Apache-2.0
"""What ranks measure of MPI between nodes as they meet: the same on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.backends.mpi.measuring import COLLS
from commrt.comm import core_of
from commrt.select.facts import Candidate
from commrt.select.fingerprint import this_machine
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.select.write import dump


def measured() -> list[Any]:
    """Return what was measured, what is chosen by it, and what it left behind."""
    comm = commrt.init()
    core = core_of(comm)
    found = core.world.mpi_between_nodes
    choices = [
        str(comm.explain(coll, nbytes).choice.candidate)
        for coll in (*COLLS, "gather", "scan")
        for nbytes in (0, 8, 1 << 12, 1 << 20, 1 << 30)
    ]
    left = [core.next_seq, core.num_plans]
    half = comm.split(comm.rank % 2)
    total = float(comm.allreduce(np.ones(1000))[-1] + half.allreduce(np.ones(3))[0])
    costs = None
    if found is not None:
        costs = [found.alpha_us, found.beta_us, sorted(found.native_us)]
    return [costs, choices, left, total]


@pytest.mark.parametrize("carrier", ["mpi", "tcp"])
@pytest.mark.parametrize("nodes", ["1,1,1", "2,1", "1,2"])
def test_all_ranks_measured_the_same_and_choose_the_same(
    mpirun: Any, nodes: str, carrier: str
) -> None:
    got = mpirun(3, measured, env={"COMMRT_NODES": nodes, "COMMRT_CARRIER": carrier})
    assert [each[:3] for each in got] == [got[0][:3]] * 3
    (alpha_us, beta_us, colls), choices, left, _ = got[0]
    assert alpha_us > 0
    assert beta_us > 0
    assert {*colls} <= {*COLLS}
    able = f"{carrier}/", "mpi/native"
    assert [each for each in choices if not each.startswith(able)] == []
    assert left == [0, 0], "measuring is no call of the program"
    assert [each[3] for each in got] == [5.0, 4.0, 5.0]


def test_nothing_is_measured_within_a_node(mpirun: Any) -> None:
    assert [each[0] for each in mpirun(2, measured)] == [None] * 2


def was_measured() -> bool:
    return core_of(commrt.init()).world.mpi_between_nodes is not None


@pytest.mark.parametrize(("nodes", "measures"), [(2, False), (1, True)])
def test_a_table_for_these_nodes_spares_the_time(
    mpirun: Any, tmp_path: Path, nodes: int, measures: bool
) -> None:
    rule = Rule("allreduce", Match(0, None, nodes=nodes), Candidate("mpi", "ring"))
    table = tmp_path / "t.yaml"
    table.write_text(dump(Table(this_machine(), (rule,))))
    env = {"COMMRT_NODES": "1,1", "COMMRT_TABLE": str(table)}
    assert mpirun(2, was_measured, env=env) == [measures] * 2
