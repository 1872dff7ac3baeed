# SPDX-License-Identifier: Apache-2.0
"""Faults that COMMRT_CHAOS injects come out as real ones do, on each kind of link."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chaos_ranks import (
    LATE_S,
    LAYOUTS,
    ON_A_NODE,
    SIZES,
    gather,
    gathered,
    outcomes,
)

from commrt import local
from commrt.comm import Communicator, core_of
from commrt.errors import (
    BackendError,
    CommError,
    MismatchError,
    RevokedError,
    TimeoutError_,
)
from commrt.local import LocalRanks
from commrt.vocabulary.operations import FUSED


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failure_is_a_backend_error_there_and_ends_the_others(
    layout: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = outcomes(
        layout, "7:fail@rank=1,op=allgather,number=3", monkeypatch, gather(5)
    )
    for rank, own in enumerate(found):
        *before, error = own
        assert len(before) == 2 or rank != 1
        assert isinstance(error, BackendError if rank == 1 else RevokedError), error
        assert (
            "COMMRT_CHAOS has injected" in str(error)
            or "MPI" in layout
            or ("relay" in layout)
        )
    said = capfd.readouterr().err
    assert said.count("COMMRT_CHAOS is set") == 1
    assert said.count("rank 1: fail: allgather #2 on local") == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", SIZES)
def test_a_late_operation_is_right(
    layout: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos = "7:delay=0.02@every=2,rank=1;delay=0.01@number=3,rank=0"
    found = outcomes(layout, chaos, monkeypatch, gather(count))
    for own in found:
        assert len(own) == 5
        for out in own:
            np.testing.assert_array_equal(out, gathered(len(found), count))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_operation_ends_by_the_deadline_of_all(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(comm: Communicator, turn: int) -> Any:
        return comm.allreduce(
            np.ones(3), algorithm="direct", timeout_s=LATE_S if turn == 2 else 240
        )

    found = outcomes(layout, "7:drop@rank=1,number=3", monkeypatch, call)
    for own in found:
        assert len(own) == 3
        assert isinstance(own[-1], TimeoutError_), own[-1]
        assert "allreduce #2" in str(own[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", SIZES)
def test_a_message_that_comes_twice_is_found_in_the_next_call(
    layout: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(comm: Communicator, turn: int) -> Any:
        # A rank of another node does not hear of it, and waits for its deadline.
        comm.timeout_s = 240 if turn < 3 or layout in ON_A_NODE else LATE_S
        return gather(count)(comm, turn)

    found = outcomes(layout, "7:duplicate@rank=1,number=3", monkeypatch, call)
    for own in found:
        for out in own[:3]:
            np.testing.assert_array_equal(out, gathered(len(found), count))
    errors = [own[-1] for own in found if isinstance(own[-1], CommError)]
    assert any(isinstance(error, MismatchError) for error in errors), found
    where = layout in ON_A_NODE
    assert all(
        isinstance(error, (MismatchError, RevokedError) if where else CommError)
        for error in errors
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", SIZES)
def test_a_flipped_bit_arrives_as_it_is_without_checksums(
    layout: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(layout, "7:corrupt@rank=1,number=3", monkeypatch, gather(count))
    flipped = 0
    for rank, own in enumerate(found):
        for turn, out in enumerate(own):
            wrong = out ^ gathered(len(found), count)
            bits = sum(int(word).bit_count() for word in wrong.view(np.uint64).flat)
            assert bits <= (turn == 2 and rank != 1), (rank, turn)
            flipped += bits
    assert flipped >= 1


def test_a_call_without_a_message_is_not_damaged(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(comm: Communicator, turn: int) -> Any:
        return comm.bcast(np.full(3, comm.rank + turn), root=0)

    found = outcomes("one node of 2", "7:corrupt@rank=1", monkeypatch, call)
    assert all((out == turn).all() for own in found for turn, out in enumerate(own))
    assert "not injected, as this rank had no message" in capfd.readouterr().err


def test_an_empty_message_cannot_be_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes("one node of 3", "7:corrupt@every=1", monkeypatch, gather(0))
    assert [len(own) for own in found] == [5, 5, 5]


@pytest.mark.parametrize("count", [0, 1, 3000, 70_001])
@pytest.mark.parametrize("kind", ["fail", "delay=0.02", "drop", "duplicate", "corrupt"])
@pytest.mark.parametrize("layout", ["one node of 2", "a relay", "MPI"])
def test_messages_between_two_ranks(
    layout: str, kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(comm: Communicator, turn: int) -> Any:
        x = np.full(count, 5 + turn)
        limit = LATE_S if turn == 1 else 240
        if comm.rank == 0:
            comm.send(x, dest=1, timeout_s=limit)
            return x
        out = np.zeros(count, x.dtype)
        comm.recv(out, source=0, timeout_s=limit)
        if kind == "duplicate" and turn == 2:  # the last one, which is still to come
            comm.recv(np.zeros_like(out), source=0)
        return out

    chaos = f"7:{kind}@op=send,rank=0,number=2"
    calls = 2 if kind == "drop" else 3  # nobody receives behind it
    sent, came = outcomes(layout, chaos, monkeypatch, call, calls=calls)
    if kind == "fail":
        assert isinstance(sent[1], BackendError)
        assert isinstance(came[1], RevokedError | TimeoutError_)
        return
    if kind == "drop":  # the sender does not know
        assert not isinstance(sent[1], CommError)
        assert isinstance(came[1], TimeoutError_)
        return
    values = [out.copy() for out in came]
    wrong = [int((out != 5 + turn).sum()) for turn, out in enumerate(values)]
    if kind == "corrupt":
        assert wrong == [0, min(count, 1), 0]
    elif kind == "duplicate":  # it is taken for the next one
        assert wrong == [0, 0, count]
    else:
        assert wrong == [0, 0, 0]


def test_a_seed_draws_the_same_every_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lines(seed: int) -> list[str]:
        monkeypatch.setenv("COMMRT_CHAOS", f"{seed}:delay=0.001@chance=0.1")
        local.run(3, lambda comm: [comm.allreduce(np.ones(2)) for _ in range(100)])
        said = capfd.readouterr().err.splitlines()
        return sorted(line for line in said if "delay: allreduce" in line)

    first, again, other = lines(1), lines(1), lines(2)
    assert first == again != other
    assert 10 < len(first) < 60


def test_rules_count_what_they_are_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(
        "COMMRT_CHAOS",
        "1:delay=0.001@op=bcast,every=2,most=2,rank=1;delay=0.002@rank=1",
    )

    def program(comm: Communicator) -> None:
        for _ in range(4):
            comm.allreduce(np.ones(2))
            comm.bcast(np.ones(2), root=1)
            comm.bcast(np.ones(2), root=0)

    local.run(2, program)
    said = [line for line in capfd.readouterr().err.splitlines() if "delay: " in line]
    assert [line.split(":")[3].strip().split(" on ")[0] for line in said] == [
        "allreduce #0",
        "bcast #2",
        "bcast #5",
    ]


def test_bound_calls_buckets_and_halves_of_pairs_are_operations_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_CHAOS", "1:fail@rank=1,number=4")
    assert "allreduce" in FUSED

    def bound(comm: Communicator) -> None:
        x = np.ones(4)
        plan = comm.plan.allreduce(x)
        for _ in range(4):
            plan()

    def fused(comm: Communicator) -> None:
        arrays = [np.ones(4) for _ in range(4)]
        for _ in range(4):
            with comm.fused():
                requests = [comm.allreduce(x, nonblocking=True) for x in arrays]
            for request in requests:
                request.wait()

    def pairs(comm: Communicator) -> None:
        for _ in range(2):
            comm.sendrecv(
                np.ones(4), dest=1 - comm.rank, source=1 - comm.rank, out=np.ones(4)
            )

    for program in (bound, fused, pairs):
        with LocalRanks(2) as ranks:

            def kind(comm: Communicator, program: Any = program) -> type | None:
                try:
                    program(comm)
                except CommError as error:
                    return type(error)
                return None

            first, second = ranks.each(kind)
            assert second is BackendError, program
            assert first in (RevokedError, None), program


def test_without_the_variable_nothing_is_injected(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COMMRT_CHAOS", raising=False)
    found = local.run(2, lambda comm: core_of(comm).world.chaos)
    assert found == [None, None]
    assert "chaos" not in capfd.readouterr().err
