# SPDX-License-Identifier: Apache-2.0
"""Corners of the engine that random programs do not reach."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_mpi import FakeMpi
from started_operations import num_started

from commrt import algorithms
from commrt.algorithms import _registry
from commrt.comm import Communicator, core_of
from commrt.errors import CommError, ScheduleError, UsageError
from commrt.job import world
from commrt.local import LocalRanks, run
from commrt.planning import host_plans
from commrt.schedule.builder import Builder
from commrt.schedule.verify import verify
from commrt.schedule.verify_lowered import verify_lowered


def test_an_operation_that_failed_touches_its_buffers_no_more() -> None:
    ranks = LocalRanks(3)
    outs = [np.full((3, 4), -1.0), np.full((3, 5), -1.0), np.full((3, 4), -1.0)]
    options: dict[str, Any] = {"algorithm": "direct", "nonblocking": True}
    requests = [
        ranks.comms[rank].allgather(
            np.ones(len(outs[rank][0])), out=outs[rank], **options
        )
        for rank in (1, 2, 0)
    ]
    # Rank 0 takes rank 1's message, which is too long, before that of rank 2.
    with pytest.raises(CommError, match="rank 1 sent a message of another length"):
        requests[2].wait()
    assert (outs[0][2] == -1).all()
    for request in requests[:2]:
        with pytest.raises(CommError):
            request.wait()


def test_more_depth_than_fragments_costs_nothing() -> None:
    def main(comm: Communicator) -> float:
        x = np.ones(20_000)
        params = {"depth": 1 << 30, "reuse": 1 << 30, "chunk": 16384}
        comm.allreduce(x, algorithm="ring", params=params)
        return float(x.sum())

    assert run(2, main) == [40_000.0] * 2


def test_a_long_message_that_does_not_fit_lets_its_sender_go_on() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 0:
            long = comm.send(np.ones(50_000), dest=1, tag=1, nonblocking=True)
            comm.send(np.ones(1), dest=1, tag=2)
            long.wait()
        else:
            # The long message has been announced once this one is here.
            comm.recv(np.empty(1), source=0, tag=2)
            with pytest.raises(CommError, match="longer than the receive buffer"):
                comm.recv(np.empty(7), source=0, tag=1)

    run(2, main, timeout_s=300)


@pytest.mark.full
def test_the_mean_of_more_ranks_than_a_word_has_bits() -> None:
    def main(comm: Communicator) -> float:
        x = np.full(4, comm.rank + 1.0)
        comm.allreduce(x, op="avg", algorithm="direct")
        return float(x[-1])

    assert run(67, main) == [pytest.approx(34.0)] * 67


@pytest.mark.parametrize("level", ["single", "multiple"])
def test_a_progress_thread_by_itself_only_where_threads_may_call_mpi(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    levels = {"single": 0, "multiple": 3}
    mpi = SimpleNamespace(Query_thread=lambda: levels[level], THREAD_MULTIPLE=3)
    monkeypatch.setattr(world.library, "load", lambda: mpi)
    monkeypatch.setenv("COMMRT_PROGRESS", "auto")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    job: Any = SimpleNamespace(
        nodes=[[0, 1]], size=2, cores=8, in_process=False, mpi=object()
    )
    assert world.progress_mode(job) is (level == "multiple")


def probe(comm: Communicator, rounds: int, timeout_s: float) -> float:
    return float(core_of(comm).probe_latency_ns(1 - comm.rank, rounds, timeout_s))


def test_a_probe_that_ran_out_of_time_does_not_disturb_the_next() -> None:
    with LocalRanks(2) as ranks:
        for rank in (1, 0):
            assert probe(ranks.comms[rank], 20, 0.001) == -1
        assert min(ranks.each(lambda comm: probe(comm, 20, 20.0))) > 0


def test_a_probe_is_not_answered_by_an_earlier_or_later_one() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        for _ in range(2):
            assert probe(first, 1, 0.001) == -1
        # The peer has given up its first probe and gone on: there was no round trip.
        for _ in range(2):
            assert probe(second, 1, 20.0) == -1
        assert min(ranks.each(lambda comm: probe(comm, 1, 20.0))) > 0


PARTS = 100  # more than a pair of ranks has message lines


def in_one_burst(b: Builder) -> None:
    """The same block again and again, which is one instruction of the sender."""
    b.blocks(1)
    scratch = b.tmp(PARTS)
    if b.rank == b.root:
        b.copy(b.out[0], b.inp[0])
    for part in range(PARTS):
        if b.rank == b.root:
            b.send(b.inp[0], b.root + 1)
        else:
            b.recv(scratch[part], b.root)
    if b.rank != b.root:
        b.copy(b.out[0], scratch[PARTS - 1])


def one_by_one(b: Builder) -> None:
    """As many messages, each of its own block."""
    b.blocks(PARTS)
    for part in range(PARTS):
        if b.rank == b.root:
            b.copy(b.out[part], b.inp[part])
            b.send(b.inp[part], b.root + 1)
        else:
            b.recv(b.out[part], b.root)


def register(monkeypatch: pytest.MonkeyPatch, author: Any) -> str:
    """Register a broadcast for two ranks under its function's name."""
    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))
    name: str = author.__name__
    two = {"supports": lambda size: size == 2, "latency": True, "bandwidth": True}
    algorithms.algorithm("bcast", name, **two)(author)
    verify(algorithms.schedule("bcast", name, 2))
    return name


def test_more_messages_than_lines_are_refused_where_they_would_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = register(monkeypatch, in_one_burst)
    with pytest.raises(ScheduleError, match="acknowledge message"):
        verify_lowered(algorithms.schedule("bcast", name, 2))

    def main(comm: Communicator) -> str:
        x = np.full(3, float(comm.rank))
        with pytest.raises(UsageError) as refused:
            comm.bcast(x, algorithm=name)
        # Nothing was sent, and nobody gets it unasked.
        assert num_started(comm) == 0
        comm.bcast(x)
        assert (x == 0).all()
        told = {
            str(no.candidate): no.reason for no in comm.explain("bcast", 24).rejected
        }
        assert told[f"local/{name}"] == "no estimate"
        return str(refused.value)

    first, second = run(2, main, timeout_s=300)
    assert first == second
    assert first.startswith(
        f"local/{name} cannot run bcast on these 2 ranks, because it needs more than "
        f"64 messages on their way from one rank to another: lowered program deadlocks"
    )
    assert first.endswith(
        "and 33 more, which never come; send fewer, or receive them as they are sent"
    )


def test_any_number_of_messages_goes_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    name = register(monkeypatch, in_one_burst)
    with FakeMpi().ranks([[0], [1]]) as ranks:
        xs = [np.full(3, 7.0 - rank) for rank in range(2)]
        requests = [
            comm.bcast(x, algorithm=name, nonblocking=True)
            for comm, x in zip(ranks.comms, xs, strict=True)
        ]
        for _ in range(10 * PARTS):
            ranks.step(0)
            ranks.step(1)
        assert [request.wait()[0] for request in requests] == [7.0, 7.0]


@pytest.mark.parametrize("number", [0, 99, 40_000])
def test_more_messages_than_lines_run_where_they_can(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    name = register(monkeypatch, one_by_one)
    verify_lowered(algorithms.schedule("bcast", name, 2))

    def main(comm: Communicator) -> bool:
        for i in range(3):
            x = np.arange(number) + float(i if comm.rank == 0 else -1)
            comm.bcast(x, algorithm=name, params={"chunk": 64})
            if not np.array_equal(x, np.arange(number) + float(i)):
                return False
        return True

    assert run(2, main, timeout_s=300) == [True, True]


@pytest.mark.parametrize("algorithm", ["direct", "recursive_doubling", "ring"])
def test_results_are_right_while_a_plan_tries_every_kind_of_stores(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # To a cache of nothing, every result is too large for it.
    monkeypatch.setattr(host_plans, "last_level_cache_nbytes", lambda: 0)
    number, runs = 40_011, 40  # trials begin at the eighth run

    def main(comm: Communicator) -> None:
        room = np.empty(number + 16, np.float32)
        x, total = np.empty(number, np.float32), comm.size * (comm.size + 1) // 2
        for step in range(runs):
            # Wherever the result starts in its cache line.
            out = room[step % 16 : step % 16 + number]
            x[:] = np.arange(number) % 1000 + step
            x *= comm.rank + 1
            room[:] = -1
            comm.allreduce(x, out=out, algorithm=algorithm, params={"chunk": 16384})
            assert (out == (np.arange(number) % 1000 + step) * total).all()
            assert (room == -1).sum() == 16

    run(3, main)


def test_a_payload_that_starts_within_a_line_leaves_the_next_one_alone() -> None:
    number, line = 8192, 16  # elements; whole lines fill their slots
    rooms = [np.empty(number + 2 * line, np.float32) for _ in range(4)]
    arrays = []
    for room, at in zip(rooms, (12, 12, 0, 0), strict=True):
        start = (-room.ctypes.data // 4 + at) % line
        arrays.append(room[start : start + number])
    ranks = LocalRanks(2)
    for rank in (0, 1):
        arrays[rank][:] = np.arange(number) * (rank + 1)
    # The second one to start publishes its sum before the first has read its input.
    requests = [
        ranks.comms[rank].allreduce(
            arrays[rank],
            out=arrays[2 + rank],
            algorithm="direct",
            params={"shots": 2},
            nonblocking=True,
        )
        for rank in (0, 1)
    ]
    while not all([request.test() for request in requests]):
        pass
    for out in arrays[2:]:
        np.testing.assert_array_equal(out, np.arange(number) * 3)
