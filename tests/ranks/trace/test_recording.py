# SPDX-License-Identifier: Apache-2.0
"""What a recording has of calls on communicators; nothing is left of it afterwards."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt import _native, trace
from commrt.errors import TimeoutError_, UsageError
from commrt.local import LocalRanks, run
from commrt.request import wait_all, wait_any
from commrt.trace import folder
from commrt.trace.job import Job, join, load
from commrt.trace.log import Log, Operation
from commrt.trace.recorder import recorder
from commrt.vocabulary.operations import COLLECTIVES, OPERATIONS

F4 = np.float32


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    recorder().clear()
    yield
    assert recorder().users == 0, "a test left a recording on"
    recorder().clear()


def recorded(size: int, main: Any, **more: Any) -> tuple[Job, list[Any]]:
    with trace.record() as recording:
        results = run(size, main, timeout_s=300, **more)
    return join(recording.logs()), results


def calls_of(job: Job, rank: int = 0) -> list[Operation]:
    return job.logs[rank].operations


def test_each_collective_has_the_bytes_of_its_logical_buffer() -> None:
    size, n = 3, 6
    prefixes = [spec.name for spec in OPERATIONS if spec.combines_some]

    def main(comm: Any) -> None:
        x = np.ones(n, F4)
        whole = np.empty(size * n, F4)
        part = np.empty(n // size, F4)
        mine = comm.rank == 1
        counts = [1, 0, 4]
        uneven = np.ones(counts[comm.rank], F4)
        comm.allreduce(x)
        comm.reduce(x, root=1)
        comm.bcast(x, root=1)
        comm.allgather(x, out=whole)
        comm.allgather(x)
        comm.reduce_scatter(x, out=part)
        comm.alltoall(x)
        comm.gather(x, root=1, out=whole if mine else None)
        comm.scatter(whole if mine else None, root=1, out=np.empty(n, F4))
        comm.barrier()
        for coll in prefixes:
            getattr(comm, coll)(x)
        comm.allgatherv(uneven, counts=counts)
        comm.gatherv(uneven, counts=counts, root=1)
        comm.scatterv(
            np.ones(5, F4) if mine else None, counts=counts, root=1, out=uneven
        )
        comm.reduce_scatterv(np.ones(5, F4), counts=counts, out=uneven)
        sent = [0, comm.rank, 1]
        came = [[0, 0, 0], [0, 1, 2], [1, 1, 1]][comm.rank]
        comm.alltoallv(np.ones(sum(sent), F4), send_counts=sent, recv_counts=came)

    job, _ = recorded(size, main)
    expected = [
        ("allreduce", 24),
        ("reduce", 24),
        ("bcast", 24),
        ("allgather", 72),
        ("allgather", 72),
        ("reduce_scatter", 24),
        ("alltoall", 24),
        ("gather", 72),
        ("scatter", 72),
        ("barrier", 0),
        *((coll, 24) for coll in prefixes),
        ("allgatherv", 20),
        ("gatherv", 20),
        ("scatterv", 20),
        ("reduce_scatterv", 20),
    ]
    for rank in range(size):
        calls = calls_of(job, rank)
        assert [(one.op, one.nbytes) for one in calls[:-1]] == expected
        assert (calls[-1].op, calls[-1].nbytes) == ("alltoallv", 4 * (rank + 1))
        assert [one.seq for one in calls] == list(range(len(calls)))
        assert {one.dtype for one in calls if one.op != "barrier"} == {"float32"}
        assert [one.root for one in calls if one.root >= 0] == [1] * 6
    assert {one[0] for one in expected} | {"alltoallv"} == set(COLLECTIVES)
    assert all(event.waiting_ns is not None for event in job.events)
    assert job.notes == []


def test_a_record_says_algorithm_group_and_place() -> None:
    def main(comm: Any) -> tuple[str, int]:
        x = np.ones(100, F4)
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        comm.allreduce(x)
        comm.allreduce(x, algorithm="ring")
        with comm.split(comm.rank % 2) as half:
            half.allreduce(x)
        return str(comm.explain("allreduce", 400).choice.candidate), line

    job, results = recorded(2, main)
    chosen, line = results[0]
    first, named, alone = calls_of(job)
    assert f"{first.backend}/{first.algorithm}" == chosen
    assert (first.site.file, first.site.line) == (__file__, line)
    assert first.site.function.endswith("main")
    assert named.algorithm == "ring"
    assert (first.group.size, first.group.ranks, first.group.rank) == (2, (0, 1), 0)
    assert (alone.group.size, alone.wire_nbytes) == (1, 0)
    assert first.group.dimension == "local"


def test_a_group_can_be_given_a_dimension() -> None:
    def main(comm: Any) -> None:
        trace.label(comm, "tp")
        comm.barrier()

    job, _ = recorded(2, main)
    assert {event.call.group.dimension for event in job.events} == {"tp"}
    with pytest.raises(UsageError, match="neither a communicator nor"):
        trace.label({}, "tp")


def test_messages_are_numbered_by_direction_peer_and_tag() -> None:
    def main(comm: Any) -> None:
        x, y = np.ones(3, F4), np.empty(3, F4)
        other = 1 - comm.rank
        if comm.rank == 0:
            comm.send(x, dest=1)
            comm.send(x, dest=1, tag=5)
            comm.send(x, dest=1)
        else:
            comm.recv(y, source=0)
            comm.recv(y, source=0, tag=5)
            comm.recv(y, source=0)
        comm.sendrecv(x, dest=other, out=y, source=other)
        comm.multi_sendrecv(
            sends=[(x, other), (x, other, 5)],
            recvs=[(y, other)] * 1 + [(x.copy(), other, 5)],
        )

    job, _ = recorded(2, main)
    found = [(one.op, one.peer, one.tag, one.seq) for one in calls_of(job)]
    assert found == [
        ("send", 1, 0, 0),
        ("send", 1, 5, 0),
        ("send", 1, 0, 1),
        ("send", 1, 0, 2),
        ("recv", 1, 0, 0),
        ("send", 1, 0, 3),
        ("send", 1, 5, 1),
        ("recv", 1, 0, 1),
        ("recv", 1, 5, 0),
    ]
    assert all(len(event.peers) == 1 for event in job.events)
    assert {one.nbytes for one in calls_of(job)} == {12}


def test_what_is_not_waited_for_ends_where_its_end_is_seen() -> None:
    def main(comm: Any) -> list[Any]:
        requests = [comm.allreduce(np.ones(n, F4), nonblocking=True) for n in (1, 0, 9)]
        assert all(isinstance(each, _native.Request) for each in requests)
        open_ones = [one.end_ns for log in here(comm) for one in log.operations]
        wait_all(requests[:2])
        index, _ = wait_any(requests[2:])
        assert requests[2].done
        assert "allreduce" in repr(requests[2])
        with pytest.raises(TypeError, match="not its completion"):
            bool(requests[0])
        total = requests[0].wait()
        return [open_ones, index, float(total[0])]

    def here(comm: Any) -> list[Any]:
        return [log for log in recording.logs() if log.rank == comm.rank]

    with trace.record() as recording:
        results = run(2, main, timeout_s=300)
    assert results == [[[None] * 3, 0, 2.0]] * 2
    assert all(event.end_ns is not None for event in join(recording.logs()).events)


def test_the_same_work_with_and_without_a_recording() -> None:
    def main(comm: Any) -> list[Any]:
        x = np.arange(1000, dtype=np.int64) * (comm.rank + 1)
        with comm.fused():
            request = comm.allreduce(x, nonblocking=True)
        gathered = comm.allgather(np.array([comm.rank])).tolist()
        return [gathered, request.wait().sum(), comm.barrier()]

    plain = run(2, main, timeout_s=300)
    with trace.record():
        assert run(2, main, timeout_s=300) == plain


def test_nothing_is_left_of_a_recording() -> None:
    with LocalRanks(1) as ranks:
        comm = ranks.comms[0]
        with trace.record() as outer:
            assert "allreduce" in vars(comm)
            comm.allreduce(np.ones(1, F4))
            with trace.record() as inner:
                comm.allreduce(np.ones(2, F4))
            comm.barrier()
        assert not {*vars(comm)} & {*COLLECTIVES, "send", "recv", "multi_sendrecv"}
        comm.allreduce(np.ones(1, F4))
        assert [one.op for one in outer.log().operations] == ["allreduce"] * 2 + [
            "barrier"
        ]
        assert [one.nbytes for one in inner.log().operations] == [8]
        assert outer.volume()["local", "allreduce"].nbytes == 12
        assert outer.volume(by=("op",))["barrier",].calls == 1


def test_start_and_stop() -> None:
    with LocalRanks(1) as ranks:
        ranks.comms[0].barrier()
        recording = trace.start()
        ranks.comms[0].barrier()
        assert trace.stop() is recording
        recording.stop()
        ranks.comms[0].barrier()
    assert len(recording.log().operations) == 1
    with pytest.raises(UsageError, match="nothing was started"):
        trace.stop()


def test_a_recording_of_no_rank_or_several_has_no_single_log() -> None:
    with trace.record() as recording:
        with pytest.raises(UsageError, match="0 ranks"):
            recording.log()
        run(2, lambda comm: comm.barrier(), timeout_s=300)
    with pytest.raises(UsageError, match=r"2 ranks .* use logs"):
        recording.volume()


def test_a_call_that_is_refused_is_no_record() -> None:
    def main(comm: Any) -> None:
        for wrong in (["a", 2], "no", None):
            with pytest.raises(UsageError):
                comm.allreduce(wrong)
        with pytest.raises(UsageError):
            comm.allreduce(np.ones(1, F4), op="plus")
        with pytest.raises(UsageError):
            comm.send(np.ones(1, F4), dest=7)
        with pytest.raises(UsageError):
            comm.multi_sendrecv(sends=[(np.ones(1, F4), 9)])
        with pytest.raises((UsageError, TypeError)):
            comm.allreduce()
        comm.allreduce(np.ones(1, F4))

    job, _ = recorded(2, main)
    assert [(one.op, one.seq) for one in calls_of(job)] == [("allreduce", 0)]


def test_calls_that_commrt_makes_for_itself_are_none_of_the_programs() -> None:
    def main(comm: Any) -> None:
        vector = (np.array([comm.rank]), np.ones(1, F4), (4,))
        comm.sparse_allreduce(vector)
        comm.topk_allreduce(np.ones(8, F4), k=2)

    job, _ = recorded(2, main)
    assert [(one.op, one.nbytes) for one in calls_of(job)] == [
        ("sparse_allreduce", 12),
        ("topk_allreduce", 32),
    ]


def test_a_call_that_fails_is_kept_at_once(tmp_path: Path) -> None:
    with LocalRanks(2) as ranks, trace.record(tmp_path):
        first, second = ranks.comms
        with pytest.raises(TimeoutError_) as failed:
            first.allreduce(np.ones(1, F4), timeout_s=0.01)
        (log,) = load([tmp_path]).logs
        assert "rank 1 on this node has not started it" in log.error
        assert [one.failed for one in log.operations] == [True]
        late = second.allreduce(np.ones(1, F4), nonblocking=True)
        failed.value.request.wait()  # type: ignore[attr-defined]
        late.wait()
    assert [len(log.operations) for log in load([tmp_path]).logs] == [1, 1]


def test_the_ring_keeps_the_latest(tmp_path: Path) -> None:
    kept = recorder().ring.maxlen
    recorder().begin(5)
    try:
        with LocalRanks(1) as ranks, trace.record(tmp_path):
            for n in range(8):
                ranks.comms[0].allreduce(np.ones(n, F4))
    finally:
        recorder().end()
        recorder().begin(kept)
        recorder().end()
    (log,) = load([tmp_path]).logs
    assert [one.nbytes for one in log.operations] == [12, 16, 20, 24, 28]
    assert log.num_dropped == 3


def test_a_log_counts_only_its_own_calls_as_lost() -> None:
    kept = recorder().ring.maxlen
    recorder().begin(5)
    try:
        with LocalRanks(1) as ranks:
            for comm, lost in ((ranks.comms[0], n) for n in (4, 0, 0, 2)):
                with trace.record() as recording:
                    for _ in range(5 + lost):
                        comm.allreduce(np.ones(1, F4))
                assert recording.log().num_dropped == lost
            with trace.record() as recording:
                comm.allreduce(np.ones(1, F4))
                comm.allreduce(np.ones(1, F4))
            for _ in range(4):  # of others, and one of its own goes
                comm.allreduce(np.ones(1, F4))
            assert recording.log().num_dropped == 1
    finally:
        recorder().end()
        recorder().begin(kept)
        recorder().end()


def test_communicators_that_are_gone_leave_nothing_but_their_records() -> None:
    kept = recorder().ring.maxlen
    recorder().begin(3)
    others = set(recorder().groups)
    try:
        with LocalRanks(1) as ranks:
            for _ in range(20):
                with ranks.comms[0].dup() as comm:
                    comm.allreduce(np.ones(1, F4))
            del comm
            gc.collect()
            gc.collect()  # what methods knew, once these are gone
            # Of the latest records, and of the communicator that all of them are from.
            assert len(set(recorder().groups) - others) == 4
    finally:
        recorder().end()
        recorder().begin(kept)
        recorder().end()


def test_a_method_keeps_its_communicator_as_it_does_without_a_recording() -> None:
    with LocalRanks(1) as ranks, trace.record():
        allreduce = ranks.comms[0].dup().allreduce
        gc.collect()
        assert allreduce(np.ones(1, F4)).tolist() == [1]


def test_calls_that_fail_at_the_same_time_are_all_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    write = folder.write_log

    def slowly(log: Log, path: Path) -> None:
        if not writing.is_set():
            writing.set()
            go_on.wait(300)
        write(log, path)

    monkeypatch.setattr(folder, "write_log", slowly)
    with LocalRanks(1) as ranks, trace.record(tmp_path) as recording:
        [comm] = ranks.comms
        comm.allreduce(np.ones(1, F4))
        first = threading.Thread(target=recording._folder.failed, args=("first",))
        first.start()
        assert writing.wait(300)
        comm.allreduce(np.ones(1, F4))
        second = threading.Thread(target=recording._folder.keep)
        second.start()
        while second.is_alive() and not waits_for_a_lock(second):
            pass
        go_on.set()
        first.join()
        second.join()
        (log,) = load([tmp_path]).logs
        assert (len(log.operations), log.is_complete) == (2, True)


def waits_for_a_lock(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == "keep"


def test_a_log_that_cannot_be_written_leaves_the_former_and_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        yield "{}"
        raise OSError(28, "No space left on device")

    with LocalRanks(1) as ranks, trace.record(tmp_path) as recording:
        ranks.comms[0].allreduce(np.ones(1, F4))
        recording._folder.keep()
        before = sorted(each.name for each in tmp_path.iterdir())
        with monkeypatch.context() as at:
            at.setattr("commrt.trace.log._lines", full)
            with pytest.raises(OSError, match="No space"):
                recording._folder.keep()
        assert sorted(each.name for each in tmp_path.iterdir()) == before
        assert load([tmp_path]).logs[0].is_complete


def test_each_communicator_is_told_that_logs_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_ASKED", folder._Asked())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMMRT_TRACE", str(tmp_path / "file" / "logs"))
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot be made"):
            folder.begin_where_asked()


def test_a_forked_process_ends_no_recording_of_its_parents() -> None:
    with LocalRanks(1) as ranks, trace.record() as recording:
        [comm] = ranks.comms
        comm.allreduce(np.ones(1, F4))
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with recorder()._lock:
                held.set()
                done.wait(300)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(300)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            recording.stop()
            own = trace.start()
            was_taken_away = "allreduce" not in vars(comm)
            own.stop()
            os._exit(0 if was_taken_away and recorder().users == 0 else 1)
        done.set()
        holder.join()
        assert os.waitpid(child, 0)[1] == 0
    assert len(recording.log().operations) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        trace.record(tmp_path / "file" / "logs").__enter__()


@pytest.mark.parametrize("folder", [5, [], object(), "\ud83d\ude00\ud800", "a\0b"])
def test_what_is_no_folder(folder: Any) -> None:
    with pytest.raises(UsageError, match="folder"):
        commrt.trace.start(folder)
    with pytest.raises(UsageError, match="nothing was started"):
        commrt.trace.stop()


def test_calls_from_many_places_are_told_apart() -> None:
    sites = recorder().sites
    frame = sys._getframe()
    assert sites.of_caller(frame) is not sites.of_caller(frame)  # two instructions
    assert sites.of_caller(frame).line == frame.f_lineno
    ours = "commrt.layers.data", "commrt.science.row_route"
    for module in (*ours, "deepspeed.comm.torch", "torch.nn"):
        made = {"f": sys._getframe, "__name__": module}
        exec("def call(take): return take(f(0))", made)
        site = made["call"](sites.of_caller)
        assert site.file == __file__, "what calls on behalf of the program"
    made = {"f": sys._getframe, "__name__": "deepspeed.common"}
    exec("def call(take): return take(f(0))", made)
    assert made["call"](sites.of_caller).file == "<string>", "a part of a program"


def test_commrt_gives_the_module() -> None:
    assert commrt.trace is trace
