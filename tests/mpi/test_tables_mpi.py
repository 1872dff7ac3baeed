# SPDX-License-Identifier: Apache-2.0
"""Selection tables on real ranks: rank 0's is everybody's, a bad one everybody's error.

Two ranks that chose by different tables would wait for each other for ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.bench.timing_loop import SharedFlags
from commrt.errors import TableError
from commrt.launch.detect import detect
from commrt.select.facts import Candidate, ParamValue
from commrt.select.fingerprint import Cpu, Machine, this_machine
from commrt.select.locate import user_table_path
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.select.write import dump
from commrt.tuning.measure import Session
from commrt.tuning.run import within
from commrt.tuning.tuner import Options


def table_of(
    machine: Machine, algorithm: str, params: Mapping[str, ParamValue] | None = None
) -> str:
    """Return a table that runs every allreduce by one algorithm."""
    use = Candidate("shm", algorithm, params or {})
    return dump(Table(machine, (Rule("allreduce", Match(0, None), use),)))


def chosen(comm: Any) -> list[Any]:
    """Return what is chosen and why, and a result."""
    lines = str(comm.explain("allreduce", 4096)).splitlines()
    return [lines[0], lines[1], float(comm.allreduce(np.ones(1024, "f4"))[-1])]


def fails_then_works() -> list[Any]:
    try:
        commrt.init()
        text = "no error"
    except TableError as error:
        text = str(error)
    del os.environ["COMMRT_TABLE"]
    os.environ["XDG_CONFIG_HOME"] = os.sep + "dev"  # no folder of tables there
    return [text, float(commrt.init().allreduce(np.ones(1))[0])]


GOOD = table_of(this_machine(), "ring")
BAD = [
    ("not a table", "t.yaml, line 1, $: expected a mapping, found 'not a table'"),
    (GOOD.replace("shm", "shn"), "unknown backend 'shn'; did you mean 'shm'?"),
    (
        GOOD.replace("ring", "rign"),
        "unknown shm allreduce algorithm 'rign'; did you mean 'ring'?",
    ),
    (GOOD[: len(GOOD) // 2], "t.yaml"),
    ("a: &a [*a, *a]", "anchors"),
    ("[" * 100_000, "nested"),
    (table_of(Machine(Cpu("another", 2, 64)), "ring"), "COMMRT_TABLE_ANY_MACHINE=1"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_table_is_the_same_error_everywhere(
    mpirun: Any, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(content)
    got = mpirun(2, fails_then_works, env={"COMMRT_TABLE": str(file)})
    assert got[0] == got[1]
    text, total = got[0]
    assert message in text
    assert total == 2.0


def test_a_table_that_is_not_there_is_an_error_not_the_model(mpirun: Any) -> None:
    env = {"COMMRT_TABLE": "/nonexistent/t.yaml"}
    for text, total in mpirun(2, fails_then_works, env=env):
        assert "cannot open the selection table /nonexistent/t.yaml" in text
        assert total == 2.0


def with_a_folder_of_ones_own(folder: str) -> list[Any]:
    os.environ["XDG_CONFIG_HOME"] = f"{folder}/{detect().rank}"
    return chosen(commrt.init())


def test_ranks_with_different_tables_use_the_one_of_rank_0(
    mpirun: Any, tmp_path: Path
) -> None:
    """Users' folders differ where home is not shared between nodes."""
    for rank, algorithm in enumerate(["ring", "recursive_doubling"]):
        file = user_table_path(environ={"XDG_CONFIG_HOME": f"{tmp_path}/{rank}"})
        file.parent.mkdir(parents=True)
        file.write_text(table_of(this_machine(), algorithm))
    got = mpirun(3, with_a_folder_of_ones_own, folder=str(tmp_path))
    assert got == [got[0]] * 3
    assert got[0][0].endswith(": shm/ring")
    assert "rule 0" in got[0][1]
    assert got[0][2] == 3.0


def in_force() -> list[Any]:
    return chosen(commrt.init())


def test_a_named_table_beats_the_users(mpirun: Any, tmp_path: Path) -> None:
    users = user_table_path(environ={"XDG_CONFIG_HOME": str(tmp_path)})
    users.parent.mkdir(parents=True)
    users.write_text(table_of(this_machine(), "ring"))
    named = tmp_path / "named.yaml"
    named.write_text(table_of(Machine(Cpu("another", 2, 64)), "recursive_doubling"))
    env = {
        "XDG_CONFIG_HOME": str(tmp_path),
        "COMMRT_TABLE": str(named),
        "COMMRT_TABLE_ANY_MACHINE": "1",
    }
    got = mpirun(2, in_force, env=env)
    assert got == [got[0]] * 2
    assert got[0][0].endswith(": shm/recursive_doubling")


def waits(way: str) -> list[Any]:
    """Return what the table chose, and results of both kinds of calls."""
    comm: Any = commrt.init()
    found = str(comm.explain("allreduce", 4096)).splitlines()[0]
    once = comm.allreduce(np.ones(1024, "f4"))
    request = comm.allreduce(np.ones(1024, "f4"), algorithm=way, nonblocking=True)
    return [found, float(once[-1]), float(request.wait()[0])]


def test_a_rule_and_a_call_may_say_how_often_a_waiting_rank_looks(
    mpirun: Any, tmp_path: Path
) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(table_of(this_machine(), "direct", {"spins": 0}))
    got = mpirun(3, waits, env={"COMMRT_TABLE": str(file)}, way="shm/ring{spins=9}")
    assert got == [got[0]] * 3
    assert got[0][0].endswith(": shm/direct{spins=0}")
    assert got[0][1:] == [3.0, 3.0]


def tunes_for(flags: str) -> list[Any]:
    session = Session(flags)
    session.barrier()
    return [session.facts.link_class, session.link_class()]


def test_the_tuner_measures_for_the_class_that_calls_will_have(
    mpirun: Any, tmp_path: Path
) -> None:
    """Pretended nodes share memory: links that it probed there would be near or far."""
    SharedFlags.create(str(tmp_path / "flags"), 2)
    got = mpirun(
        2, tunes_for, env={"COMMRT_NODES": "1,1"}, flags=str(tmp_path / "flags")
    )
    assert got == [["network", "network"]] * 2


def is_crowded() -> bool:
    return Session(None).crowded


@pytest.mark.parametrize("more", [0, 1])
def test_nodes_of_one_machine_share_its_cores(mpirun: Any, more: int) -> None:
    """As containers do: each pretends to have all cores for its own rank."""
    cores = len(os.sched_getaffinity(0))
    nodes = max(2, cores) + more
    env = {"COMMRT_NODES": ",".join(["1"] * nodes)}
    assert mpirun(nodes, is_crowded, env=env) == [nodes > cores] * nodes


def tunes_for_no_time(out: str) -> str:
    options = Options(ranks=(2,), ops=("allreduce",), budget_s=0.01)
    try:
        return str(within(options, out=Path(out), raw=None))
    except TableError as error:
        return str(error)


def test_only_rank_0_speaks_of_a_table_that_was_not_written(
    mpirun: Any, tmp_path: Path
) -> None:
    said, silent = mpirun(2, tunes_for_no_time, out=str(tmp_path / "table.yaml"))
    assert "no table was written: the budget ended" in said
    assert silent == "None"
