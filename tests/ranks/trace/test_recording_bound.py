# SPDX-License-Identifier: Apache-2.0
"""Bound calls, halos and neighbours in a log; and what single calls ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commrt import _native, trace
from commrt.errors import UsageError
from commrt.local import LocalRanks, run
from commrt.trace.job import Job, join
from commrt.trace.log import Operation
from commrt.trace.recorder import recorder

F4 = np.float32


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    recorder().clear()
    yield
    assert recorder().users == 0, "a test left a recording on"
    recorder().clear()


def recorded(size: int, main: Any) -> tuple[Job, list[Any]]:
    with trace.record() as recording:
        results = run(size, main, timeout_s=300)
    return join(recording.logs()), results


def calls_of(job: Job, rank: int = 0) -> list[Operation]:
    return job.logs[rank].operations


# -- bound calls -----------------------------------------------------------------


def test_runs_of_a_bound_collective() -> None:
    def main(comm: Any) -> str:
        x = np.ones(6, F4)
        step = comm.plan.allreduce(x, algorithm="ring")
        step()
        step.start().wait()
        whole = comm.plan.allgather(x, out=np.empty(6 * comm.size, F4))
        whole()
        part = np.empty(6 // comm.size, F4)
        comm.plan.reduce_scatter(x, out=part).start().wait()
        comm.plan.barrier()()
        return str(step.label)

    job, labels = recorded(2, main)
    for rank in range(2):
        calls = calls_of(job, rank)
        assert [(one.op, one.nbytes, one.seq) for one in calls] == [
            ("allreduce", 24, 0),
            ("allreduce", 24, 1),
            ("allgather", 48, 2),
            ("reduce_scatter", 24, 3),
            ("barrier", 0, 4),
        ]
        assert all(one.end_ns is not None for one in calls)
        assert {one.site.function.split(".")[-1] for one in calls} == {"main"}
        assert f"{calls[0].backend}/{calls[0].algorithm}" == labels[rank]
    assert all(event.waiting_ns is not None for event in job.events)


def test_calls_bound_before_are_recorded_only_while_somebody_records() -> None:
    with LocalRanks(1) as ranks:
        comm = ranks.comms[0]
        x, y = np.ones(2, F4), np.empty(2, F4)
        bound = [
            comm.plan.allreduce(x),
            comm.plan.multi_sendrecv(sends=[(x, 0)], recvs=[(y, 0)]),
            comm.plan.sendrecv(x, dest=0, out=y, source=0),
            comm.plan.topk_allreduce(x, 1),
        ]
        kinds = [*map(type, bound)]
        with trace.record() as recording:
            for each in bound:
                each()
                each.start().wait()
        assert [*map(type, bound)] == kinds
        assert kinds[:2] == [_native.PersistentCall, _native.PersistentMessages]
        for each in bound:
            each()
        found = [(one.op, one.seq) for one in recording.log().operations]
        assert found == [
            *[("allreduce", 0), ("allreduce", 1)],
            *[("send", 0), ("recv", 0), ("send", 1), ("recv", 1)],
            *[("send", 2), ("recv", 2), ("send", 3), ("recv", 3)],
            *[("topk_allreduce", 2), ("topk_allreduce", 3)],
        ]
        assert all(one.end_ns is not None for one in recording.log().operations)


def test_bound_messages_meet_ordinary_ones() -> None:
    def main(comm: Any) -> None:
        x, y = np.ones(3, F4), np.empty(3, F4)
        if comm.rank == 0:
            comm.plan.send(x, dest=1, tag=2)()
        else:
            comm.recv(y, source=0, tag=2)
        if comm.rank == 1:
            comm.plan.recv(y, source=0).start().wait()
        else:
            comm.send(x, dest=1)

    job, _ = recorded(2, main)
    found = [(one.op, one.peer, one.tag, one.seq) for one in calls_of(job)]
    assert found == [("send", 1, 2, 0), ("send", 1, 0, 0)]
    assert all(len(event.peers) == 1 for event in job.events)


def test_a_bound_call_that_is_refused_is_no_record() -> None:
    with LocalRanks(1) as ranks, trace.record() as recording:
        comm = ranks.comms[0]
        step = comm.plan.allreduce(np.ones(1, F4))
        given = comm.plan.sparse_allreduce((np.array([0]), np.ones(1, F4), (2,)))
        step()
        comm.free()
        for each in (step, step.start, given):
            with pytest.raises((UsageError, RuntimeError)):
                each()
    assert [one.op for one in recording.log().operations] == ["allreduce"]


# -- halos and neighbours --------------------------------------------------------


@pytest.mark.parametrize("bound", [False, True])
def test_halos_have_the_bytes_that_a_rank_sends(bound: bool) -> None:
    size, low, high = 3, 1, 2

    def main(comm: Any) -> None:
        cart = comm.cart((size, 1), periodic=(False, False))
        u = np.zeros((5 + low + high, 4), F4)
        v = np.zeros((5 + low + high, 4), np.float64)
        width = ((low, high), 0)
        calls = cart.plan if bound else cart
        for _ in range(2):
            made = calls.halo_exchange([u, v], width)
            if bound:
                made()
        made = calls.halo_reduce(u, width)
        if bound:
            made.start().wait()

    job, _ = recorded(size, main)
    row = 4 * 4
    for rank in range(size):
        # To the rank behind goes what fills its lower halo, to the other its upper.
        cells = (low if rank < size - 1 else 0) + (high if rank > 0 else 0)
        back = (high if rank < size - 1 else 0) + (low if rank > 0 else 0)
        found = [(one.op, one.nbytes) for one in calls_of(job, rank)]
        assert found == [
            *[("halo_exchange", 3 * row * cells)] * 2,
            ("halo_reduce", row * back),
        ]
    assert {one.algorithm for one in calls_of(job)} <= {"direct", "by_dimension"}
    assert all(one.end_ns is not None for one in calls_of(job))


@pytest.mark.parametrize("bound", [False, True])
def test_neighbour_collectives_have_the_bytes_that_a_rank_sends(bound: bool) -> None:
    size = 3

    def main(comm: Any) -> None:
        cart = comm.cart((size,), periodic=(False,))
        beside = 1 if cart.rank in (0, size - 1) else 2
        there = [rank is not None for rank in cart.neighbors]
        calls = cart.plan if bound else cart
        counts = [3 if each else 0 for each in there]
        made = [
            calls.neighbor_allgather(np.ones(4, F4)),
            calls.neighbor_alltoall(np.ones(2 * 4, F4)),
            calls.neighbor_alltoallv(
                np.ones(3 * beside, F4), send_counts=counts, recv_counts=counts
            ),
        ]
        for each in made if bound else ():
            each()

    job, _ = recorded(size, main)
    for rank in range(size):
        beside = 1 if rank in (0, size - 1) else 2
        assert [(one.op, one.nbytes) for one in calls_of(job, rank)] == [
            ("neighbor_allgather", 16 * beside),
            ("neighbor_alltoall", 16 * beside),
            ("neighbor_alltoallv", 12 * beside),
        ]


# -- what a call asks for --------------------------------------------------------


def test_what_a_call_asks_for_shows_in_the_log() -> None:
    def main(comm: Any) -> list[str]:
        x = np.ones(1000, F4)
        for wish in WISHES:
            for _ in range(2):
                comm.allreduce(x, **wish)
        asked = [comm.explain("allreduce", 4000, **wish) for wish in WISHES[:-1]]
        return [str(each.choice.candidate) for each in asked]

    job, results = recorded(2, main)
    calls = calls_of(job)
    found = [f"{one.backend}/{one.algorithm}" for one in calls]
    assert found[::2] == found[1::2] == [*results[0], "compressed/bfloat16"]
    assert found[2:6] == ["local/ring"] * 4
    assert found[6] == "local/ring{chunk=65536}"


WISHES: list[dict[str, Any]] = [
    {},
    {"algorithm": "ring"},
    {"backend": "local", "algorithm": "ring"},
    {"algorithm": "ring", "params": {"chunk": 65536}},
    {"compress": "bfloat16"},
]
