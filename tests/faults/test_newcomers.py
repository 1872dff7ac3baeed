# SPDX-License-Identifier: Apache-2.0
"""Processes that were started later become ranks: ``grow``, and ``init`` that joins."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_ranks import RunRanks

import commrt
import commrt.founding
from commrt.comm import Communicator, core_of
from commrt.errors import (
    CommError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)

FAILED = (PeerFailedError, RevokedError)


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def sum_of(comm: Communicator) -> float:
    return float(comm.allreduce(np.array([2.0**comm.rank]))[0])


def started_again(dies: list[int]) -> list[Any]:
    """Each of some ranks dies once, and comes again; then all have the same number."""
    comm = commrt.init()
    steps = 0
    if comm.joined:
        steps = int(comm.bcast(np.array([0]), root=0)[0])
    elif comm.rank in dies:
        os.kill(os.getpid(), signal.SIGKILL)
    size = 4
    while comm.size < size or steps < 3:
        try:
            waits = float(comm.num_waiting()) if comm.rank == 0 else 0.0
            if comm.allreduce(np.array([waits]))[0]:
                comm = comm.grow()
                steps = int(comm.bcast(np.array([steps]), root=0)[0])
            elif comm.size == size:
                steps += 1
        except FAILED:
            comm = comm.shrink()
    same = core_of(commrt.init()) is core_of(comm)
    return [comm.size, sum_of(comm), steps, same]


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("dies", [[0], [3], [1, 2]])
def test_ranks_that_are_started_again_join(ranks: RunRanks, dies: list[int]) -> None:
    again = RunRanks(ranks.folder, options=("--restarts", str(len(dies))))
    found = again.survivors(4, started_again, dies=dies)
    assert {*map(str, found.values())} == {str([4, 15.0, 3, True])}
    assert len(found) == 4


NEWCOMER = """
import json, os, signal, sys
import numpy as np
import commrt
from commrt.errors import CommError

how = sys.argv[1]
if how == "connecting":
    import commrt.founding
    commrt.founding.connect_world = lambda *_, **__: os.kill(os.getpid(), 9)
try:
    comm = commrt.init(deterministic=True if how == "deterministic" else None)
    total = float(comm.allreduce(np.array([2.0 ** comm.rank]))[0])
    said = [comm.rank, comm.size, list(comm.joined), total, comm.timeout_s]
except CommError as error:
    said = [type(error).__name__, str(error)]
sys.stdout.write(json.dumps(said))
"""


def newcomer(how: str = "", **variables: str) -> subprocess.Popen[str]:
    """Start a process that joins this one's job."""
    environ = dict(os.environ, COMMRT_JOIN="1", **variables)
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", NEWCOMER, how],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )


def said_by(process: subprocess.Popen[str]) -> Any:
    text, _ = process.communicate(timeout=250)
    return json.loads(text) if text else None


def takes_in(hows: list[str]) -> list[Any]:
    """Rank 0 starts newcomers, and all take in as many as come."""
    comm = commrt.init()
    comm.timeout_s = 300
    started = [newcomer(how) for how in hows] if comm.rank == 0 else []
    made = comm.grow(len(hows))
    said = [list(made.joined), made.size, sum_of(made), sum_of(comm)]
    return [said, [said_by(each) for each in started]]


@pytest.mark.parametrize("count", [1, 3])
def test_ranks_grow(ranks: RunRanks, count: int) -> None:
    new = list(range(2, 2 + count))
    found = ranks.survivors(2, takes_in, hows=[""] * count)
    size, total = 2 + count, 2.0 ** (2 + count) - 1
    expected = [new, size, total, 3.0]
    assert [said for said, _ in found.values()] == [expected] * 2
    told = sorted(found[0][1])
    assert told == [[rank, size, new, total, 300] for rank in new]


def changes_often(rounds: int) -> list[int]:
    """Ranks take one in and lose it again; returns the descriptors at each time."""
    comm = commrt.init()
    sum_of(comm)
    counts = [len(os.listdir("/proc/self/fd"))]
    for _ in range(rounds):
        started = [newcomer()] if comm.rank == 0 else []
        grown = comm.grow(1)
        comm.free()
        sum_of(grown)
        assert [said_by(each) for each in started] != [None]
        with pytest.raises(PeerFailedError):  # it has left
            sum_of(grown)
        comm = grown.shrink()
        grown.free()
        del grown
        sum_of(comm)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_what_ranks_hold_stays_the_same_however_often_they_change(
    ranks: RunRanks,
) -> None:
    for counts in ranks.survivors(2, changes_often, rounds=3).values():
        assert len({*counts}) == 1, counts


def test_a_newcomer_that_dies_meanwhile_is_left_out(ranks: RunRanks) -> None:
    found = ranks.survivors(2, takes_in, hows=["connecting", ""])
    assert [said[1:] for said, _ in found.values()] == [[3, 7.0, 3.0]] * 2
    assert [each for each in found[0][1] if each] == [[2, 3, [2], 7.0, 300]]


def loses_one_meanwhile(dying: int) -> Any:
    comm = commrt.init()
    process = newcomer() if comm.rank == 0 else None
    if comm.rank == dying:
        commrt.founding.connect_world = lambda *_, **__: os.kill(os.getpid(), 9)
    made = comm.grow(1)
    said = [made.size, sum_of(made), list(made.joined)]
    return [said, said_by(process) if process else None]


@pytest.mark.parametrize("dying", [1, 2])
def test_newcomers_are_known_where_a_rank_dies_meanwhile(
    ranks: RunRanks, dying: int
) -> None:
    found = ranks.survivors(3, loses_one_meanwhile, dying=dying)
    assert len(found) == 2
    assert [said for said, _ in found.values()] == [[3, 7.0, [2]]] * 2
    assert found[0][1][:4] == [2, 3, [2], 7.0]


def test_one_that_asks_for_something_else_is_refused(ranks: RunRanks) -> None:
    found = ranks.survivors(2, takes_in, hows=["deterministic", ""])
    assert [said[1:] for said, _ in found.values()] == [[3, 7.0, 3.0]] * 2
    refused = [each for each in found[0][1] if each[0] == "UsageError"]
    assert "has deterministic=False, and here it is True" in refused[0][1]


def waits_in_vain() -> list[Any]:
    comm = commrt.init()
    with pytest.raises(TimeoutError_, match="0 of 1 processes wait to join"):
        comm.grow(1, timeout_s=0.2)
    said: list[Any] = [comm.num_waiting(), sum_of(comm)]
    assert comm.grow() is comm
    if comm.rank == 0:
        said.append(said_by(newcomer(COMMRT_TIMEOUT_S="0.3")))
    comm.barrier()
    said.append(comm.grow() is comm)
    return said


def test_nobody_waits_for_ever(ranks: RunRanks) -> None:
    found = ranks.survivors(2, waits_in_vain)
    kind, words = found[0][2]
    assert kind == "TimeoutError_"
    assert "no ranks of it called grow() within 0.3 s" in words
    assert [found[0][:2], found[0][3:], found[1]] == [[0, 3.0], [True], [0, 3.0, True]]


def refuses() -> list[str]:
    comm = commrt.init()
    texts = []
    for arguments in ({"count": -1}, {"count": "x"}, {"name": 5}, {"timeout_s": -1}):
        with pytest.raises(UsageError) as raised:
            comm.grow(**arguments)
        texts.append(str(raised.value))
    comm.revoke()
    with pytest.raises(RevokedError):
        comm.grow()
    return texts


def test_wrong_calls_say_what_is_wrong(ranks: RunRanks) -> None:
    texts = ranks.survivors(2, refuses)[0]
    assert all(text.startswith("grow: ") for text in texts[:2])
    assert "name=5" in texts[2]
    assert "timeout_s" in texts[3]


def joins_with_mpi_only() -> str:
    try:
        commrt.init()
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_no_other_launch_can_be_joined(mpirun: Any) -> None:
    (said, _) = mpirun(2, joins_with_mpi_only, env={"COMMRT_JOIN": "1"})
    assert said.startswith("UsageError: COMMRT_JOIN=1 means that this process joins")
