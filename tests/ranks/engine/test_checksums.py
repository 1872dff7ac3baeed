# SPDX-License-Identifier: Apache-2.0
"""COMMRT_CHECKSUM: a bit that flips on its way is found, on every rank of the call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from chaos_ranks import LAYOUTS, SIZES, gather, gathered, outcomes

from commrt.comm import Communicator, core_of
from commrt.errors import CommError, IntegrityError, RevokedError
from commrt.local import LocalRanks

CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "allreduce": lambda comm, x: comm.allreduce(x.copy(), algorithm="direct"),
    "ring": lambda comm, x: comm.allreduce(x.copy(), algorithm="ring"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(np.repeat(x, comm.size)),
    "bcast": lambda comm, x: comm.bcast(x.copy(), root=1),
    "alltoall": lambda comm, x: comm.alltoall(np.repeat(x, comm.size)),
}


@pytest.fixture(autouse=True)
def _with_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_CHECKSUM", "1")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", SIZES)
def test_a_flipped_bit_is_found_on_all_ranks(
    layout: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(layout, "7:corrupt@rank=1,number=3", monkeypatch, gather(count))
    named = 0
    for rank, own in enumerate(found):
        for turn, out in enumerate(own[:-1]):
            # A rank that got a whole message may be done before it hears of it.
            assert turn <= 3
            np.testing.assert_array_equal(out, gathered(len(found), count))
        error = own[-1]
        assert isinstance(error, IntegrityError | RevokedError), (rank, error)
        named += f"from rank 1 to rank {rank}" in str(error) and (
            isinstance(error, IntegrityError)
        )
        assert "allgather #" in str(error)
        assert "damaged on its way: its checksum does not fit" in str(error)
    assert named >= 1


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_operations_of_every_kind(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(comm: Communicator, turn: int) -> Any:
        return CALLS[name](comm, np.full(3000, comm.rank + turn))

    found = outcomes(
        f"one node of {size}", "3:corrupt@rank=1,number=2", monkeypatch, call
    )
    errors = [own[-1] for own in found]
    assert any(isinstance(error, IntegrityError) for error in errors), errors
    for rank, error in enumerate(errors):
        # A rank that only sends may be done before it hears of it.
        is_root = name == "bcast" and rank == 1
        assert is_root or isinstance(error, IntegrityError | RevokedError), error


MESSAGES: dict[str, Callable[[Communicator, Any, Any], Any]] = {
    "send and recv": lambda comm, x, out: (
        comm.send(x, dest=0, tag=7) if comm.rank else comm.recv(out, source=1, tag=7)
    ),
    "nonblocking": lambda comm, x, out: (
        comm.send(x, dest=0, tag=7, nonblocking=True)
        if comm.rank
        else comm.recv(out, source=1, tag=7, nonblocking=True)
    ).wait(),
    "sendrecv": lambda comm, x, out: comm.sendrecv(
        x, dest=1 - comm.rank, out=out, source=1 - comm.rank, sendtag=7, recvtag=7
    ),
    "multi_sendrecv": lambda comm, x, out: comm.multi_sendrecv(
        sends=[(x, 1 - comm.rank, 7)], recvs=[(out, 1 - comm.rank, 7)]
    ),
}
ON_LINKS = ["one node of 2", "a relay", "MPI"]
LENGTHS = (1, 4, 30, 5000, 300_000)
"""Of float64: in a line, in one packet, announced, and what a relay carries whole."""


@pytest.mark.parametrize("how", MESSAGES)
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("layout", ON_LINKS)
def test_a_flipped_bit_of_a_message_is_found(
    layout: str, count: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(comm: Communicator, turn: int) -> Any:
        out = np.zeros(count)
        MESSAGES[how](comm, np.full(count, 1.0 + comm.rank + turn), out)
        comm.barrier()  # who only sends hears of it there
        return out

    chaos = "7:corrupt@rank=1,op=send,number=2"
    found = outcomes(layout, chaos, monkeypatch, call)
    receives = found[0]
    for turn, out in enumerate(receives[:-1]):
        np.testing.assert_array_equal(out, np.full(count, 2.0 + turn))
    error = receives[-1]
    assert isinstance(error, IntegrityError), error
    expected = (
        f"a message of {count * 8} bytes from rank 1 to rank 0 was damaged on its way: "
        f"its checksum does not fit, tag 7"
    )
    assert expected in str(error)
    assert isinstance(found[1][-1], IntegrityError | RevokedError), found[1][-1]


@pytest.mark.parametrize("how", MESSAGES)
@pytest.mark.parametrize("count", [0, *LENGTHS])
@pytest.mark.parametrize("layout", ON_LINKS)
def test_whole_messages_arrive(
    layout: str, count: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMMRT_CHAOS", raising=False)

    def program(comm: Communicator) -> None:
        for turn in range(3):
            out = np.zeros(count)
            MESSAGES[how](comm, np.full(count, 1.0 + comm.rank + turn), out)
            if comm.rank == 0 or "sendrecv" in how:
                expected = np.full(count, 2.0 - comm.rank + turn)
                np.testing.assert_array_equal(out, expected)

    with LAYOUTS[layout]() as ranks:
        ranks.each(program)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 48, 2088 // 8, 2096 // 8, 8192 // 8, 70_001])
def test_without_a_fault_all_is_right(
    layout: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMMRT_CHAOS", raising=False)
    with LAYOUTS[layout]() as ranks:

        def program(comm: Communicator) -> None:
            assert core_of(comm).has_checksums
            for turn in range(3):
                out = gather(count)(comm, turn)
                np.testing.assert_array_equal(out, gathered(comm.size, count))
                total = comm.allreduce(np.full(count, comm.rank), algorithm="ring")
                assert (total == sum(range(comm.size))).all()

        ranks.each(program)


def test_symmetric_memory_goes_through_slots_then() -> None:
    with LocalRanks(2) as ranks:

        def program(comm: Communicator) -> None:
            x = comm.empty(100_000, "float64")
            x[:] = comm.rank + 1
            assert (comm.allreduce(x) == 3).all()

        ranks.each(program)


def test_later_calls_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_CHAOS", "7:corrupt@rank=1")
    with LocalRanks(2) as ranks:

        def program(comm: Communicator) -> None:
            with suppress(CommError):
                for _ in range(3):
                    comm.allreduce(np.ones(4))
            assert core_of(comm).failure
            with pytest.raises(IntegrityError, match="damaged on its way"):
                comm.barrier()

        ranks.each(program)
