# SPDX-License-Identifier: Apache-2.0
"""The table of ranks in an error, and files of the last operations, on request."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import core_of
from commrt.errors import TimeoutError_, UsageError
from commrt.group.rank_states import RankState
from commrt.local import LocalRanks, run
from commrt.trace.divergence import compare
from commrt.trace.dump_reader import Dump, find_dumps, read_dump

X = np.ones(6, np.float32)


def dumps_in(folder: Path) -> list[Dump]:
    return [read_dump(path) for path in find_dumps([folder])]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_an_error_has_what_each_rank_does(size: int) -> None:
    come = threading.Event()

    def main(comm: Any) -> Any:
        comm.allreduce(X.copy())
        last = comm.rank == comm.size - 1
        if last:
            come.wait(300)
        try:
            # Only the rank that raises first lets the last one come.
            comm.allreduce(X.copy(), timeout_s=0.3 if comm.rank == 0 else 300)
        except TimeoutError_ as error:
            come.set()
            error.request.wait(timeout_s=300)
            return error.ranks, str(error)
        return None

    states, text = run(size, main, timeout_s=300)[0]
    assert [one.rank for one in states] == [*range(size)]
    mine, late = states[0], states[-1]
    assert (mine.state, mine.waits_in, mine.waits_seq) == ("waiting", "allreduce", 1)
    assert mine.waits_on == "local"
    assert mine.waits_s == pytest.approx(0.3)
    assert (late.state, late.started, late.last) == ("computing", 1, "allreduce")
    assert (late.last_seq, late.waits_s) == (0, None)
    assert late.age_s is not None
    assert late.age_s >= 0.3
    assert "\n  rank 0: waiting for 0.3 s in allreduce #1\n" in text
    assert f"\n  rank {size - 1}: computing; its last collective here was al" in text


def test_a_rank_that_waits_elsewhere_is_told_so() -> None:
    """The last rank waits for a message, on another communicator."""

    def main(comm: Any) -> Any:
        other = comm.dup(name="side")
        if comm.rank == 1:
            x = other.recv(np.empty(1), source=0)
            return float(comm.allreduce(x)[0])
        request = comm.allreduce(np.ones(1), nonblocking=True)
        states: list[RankState] = []
        while not states or states[1].state != "waiting":
            with pytest.raises(TimeoutError_) as raised:
                request.wait(timeout_s=0.05)
            states = [*raised.value.ranks]
        other.send(np.full(1, 4.0), dest=1)
        return float(request.wait(timeout_s=300)[0]), states[1], str(raised.value)

    (total, state, text), theirs = run(2, main, timeout_s=300)
    assert (total, theirs) == (5.0, 5.0)
    assert (state.waits_in, state.waits_seq, state.waits_on) == ("recv", 0, "side")
    assert (state.waits_for, state.started) == (0, 0)
    assert "s in recv #0 from rank 0 on side; it has started no coll" in text


def test_a_wait_of_python_is_a_wait() -> None:
    """A receive from anyone waits in a loop of Python."""

    def main(comm: Any) -> Any:
        if comm.rank == 1:
            got = float(comm.recv(np.empty(1))[0])
            comm.send(np.ones(1), dest=0, tag=9)
            return got
        request = comm.recv(np.empty(1), source=1, tag=9, nonblocking=True)
        states: list[RankState] = []
        while not states or states[1].state != "waiting":
            with pytest.raises(TimeoutError_) as raised:
                request.wait(timeout_s=0.05)
            states = [*raised.value.ranks]
        comm.send(np.full(1, 4.0), dest=1)
        request.wait(timeout_s=300)
        return states[1].waits_s

    waited, got = run(2, main, timeout_s=300)
    assert got == 4.0
    assert waited >= 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_dump_has_the_last_operations_of_each_rank(tmp_path: Path, size: int) -> None:
    with LocalRanks(size) as ranks:

        def calls(comm: Any) -> None:
            for _ in range(300):
                comm.allreduce(X.copy())
            comm.bcast(np.ones(0, np.int64), root=size - 1)
            right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
            comm.sendrecv(np.ones(3), dest=right, source=left, out=np.empty(3))
            comm.barrier()

        ranks.each(calls)
        paths = commrt.trace.dump(tmp_path)
        mine = {core_of(comm).world.job for comm in ranks.comms}
    dumps = [one for one in dumps_in(tmp_path) if one.job in mine]
    assert {one.path for one in dumps} <= {*paths}
    assert [one.rank for one in dumps] == [*range(size)]
    for one in dumps:
        (group,) = one.groups.values()
        assert (group.name, group.ranks) == ("local", tuple(range(size)))
        entries = [each for each in one.entries if not each.is_message]
        assert [each.seq for each in entries][-1] == 301
        assert entries[-2].op == "bcast"
        assert (entries[-2].root, entries[-2].count) == (size - 1, 0)
        assert (entries[0].op, entries[0].count) == ("allreduce", 6)
        assert (entries[0].dtype, entries[0].reduction) == ("float32", "sum")
        assert [each.seq for each in entries] == [*range(302 - len(entries), 302)]
        assert {each.state for each in one.entries} == {"completed"}
        times = [each.created_ns for each in entries]
        assert times == sorted(times)
        assert times[-1] <= one.written_ns
        messages = [each for each in one.entries if each.is_message]
        assert {(each.op, each.count) for each in messages} == {
            ("send", 24),
            ("recv", 24),
        }
        assert (one.reason, one.message) == ("request", "commrt.trace.dump()")
    assert compare(dumps).divergences == []


def test_dumps_tell_the_rank_that_called_something_else(tmp_path: Path) -> None:
    with LocalRanks(3) as ranks:
        ranks.each(lambda comm: comm.barrier())
        job = core_of(ranks.comms[0]).world.job
        begun = [
            comm.allreduce(X.copy(), nonblocking=True)
            for comm in ranks.comms
            if comm.rank != 1
        ]
        commrt.trace.dump(tmp_path)
        begun.insert(1, ranks.comms[1].allreduce(X.copy(), nonblocking=True))
        ranks.each(lambda comm: begun[comm.rank].wait())
    verdict = compare(dumps_in(tmp_path), job)
    (one,) = verdict.divergences
    assert (one.group, one.seq, [*one.missing]) == ("local", 1, [1])
    assert one.calls == {"allreduce of 6 float32, op sum": [0, 2]}
    whole = json.loads((tmp_path / f"dump-{job}-rank0.json").read_text())
    assert whole["entries"][-1]["state"] == "started"
    assert whole["rank_states"][1]["started"] == 1


def test_freed_communicators_are_in_no_dump(tmp_path: Path) -> None:
    with LocalRanks(2) as ranks:

        def calls(comm: Any) -> None:
            comm.dup(name="short").free()
            comm.barrier()

        ranks.each(calls)
        commrt.trace.dump(tmp_path)
        job = core_of(ranks.comms[0]).world.job
    for one in dumps_in(tmp_path):
        if one.job == job:
            assert [group.name for group in one.groups.values()] == ["local"]


@pytest.mark.parametrize("folder", ["\0", 5, "/dev/null/inside"])
def test_a_folder_that_cannot_be_made_is_refused(folder: Any) -> None:
    with pytest.raises(
        UsageError, match=r"for dumps cannot be made: .*; name one that"
    ):
        commrt.trace.dump(folder)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with LocalRanks(1) as ranks:
        job = core_of(ranks.comms[0]).world.job
        path = tmp_path / f"dump-{job}-rank0.json"
        path.mkdir()
        with pytest.raises(OSError, match="Is a directory") as raised:
            commrt.trace.dump(tmp_path)
        assert raised.value.filename == str(path)
    # Nothing half written is left; other worlds of this process may have files, too.
    assert [*tmp_path.glob(f"*{job}*")] == [path]


def test_other_waits_than_a_requests_have_the_table_too() -> None:
    def main(comm: Any) -> Any:
        found = []
        if comm.rank == 0:
            for late in (
                lambda: comm.recv(np.empty(1), timeout_s=0.1),
                lambda: comm.probe(1, timeout_s=0.1),
                lambda: comm.recv_object(source=1, timeout_s=0.1),
            ):
                with pytest.raises(TimeoutError_) as raised:
                    late()
                found.append([one.rank for one in raised.value.ranks])
        core_of(comm).world.meet([0, 1], "tried")
        return found

    assert run(2, main, timeout_s=300)[0] == [[0, 1]] * 3
