# SPDX-License-Identifier: Apache-2.0
"""Check mode finds a program that writes to an array while a call sends it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from commrt.comm import Communicator
from commrt.errors import ChangedInFlightError, CommError
from commrt.local import LocalRanks


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")


def start(comm: Communicator, what: str, x: Any) -> Any:
    """Start a call on ``x``; return its request and its expected result per element."""
    other = 1 - comm.rank
    if what == "in place":
        return comm.allreduce(x, nonblocking=True)
    if what == "out of place":
        return comm.allreduce(x, out=np.empty_like(x), nonblocking=True)
    if what == "own block":
        whole = np.empty((comm.size, x.size), x.dtype)
        whole[comm.rank] = x
        x = whole[comm.rank]
        return comm.allgather(x, out=whole, nonblocking=True), x
    if what == "send":
        if comm.rank == 0:
            return comm.send(x, dest=1, nonblocking=True)
        return comm.recv(np.empty_like(x), source=0, nonblocking=True)
    out = np.empty_like(x)
    return comm.sendrecv(x, dest=other, out=out, source=other, nonblocking=True)


def result_of(request: Any) -> Any:
    try:
        return request.wait()
    except CommError as error:
        return error


def outcomes(what: str, size: int, *, write: bool) -> list[Any]:
    """Rank 0 changes one element before the others make the call."""
    with LocalRanks(2) as ranks:
        x = [np.full(size, 1 + rank, np.int64) for rank in range(2)]

        def program(comm: Communicator) -> Any:
            comm.timeout_s = 240
            made = start(comm, what, x[comm.rank])
            request, array = made if isinstance(made, tuple) else (made, x[comm.rank])
            if comm.rank == 0 and write and not request.done:
                array[size // 2] += 40
            meet()
            first, again = result_of(request), result_of(request)
            assert again is first
            assert comm.allreduce(np.ones(2)).tolist() == [2, 2]
            return first

        barrier = threading.Barrier(2)

        def meet() -> None:
            barrier.wait(240)

        return ranks.each(program)


KINDS = ["in place", "out of place", "own block", "send", "sendrecv"]


# A call whose array is the rank's own block of its output may work in a copy of it.
@pytest.mark.parametrize("what", [what for what in KINDS if what != "own block"])
def test_a_write_is_found_and_named(what: str) -> None:
    # Long enough that the peer's part is needed before it ends.
    first, second = outcomes(what, 200_001, write=True)
    assert isinstance(first, ChangedInFlightError), first
    name = {"send": "send", "sendrecv": "sendrecv", "own block": "allgather"}
    assert str(first).startswith(name.get(what, "allreduce"))
    assert "(called at test_changed_in_flight.py:" in str(first)
    assert not isinstance(second, CommError)


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("size", [1, 7, 5000, 200_001])
def test_a_program_that_does_not_write_gets_its_result(what: str, size: int) -> None:
    first, second = outcomes(what, size, write=False)
    assert not isinstance(first, CommError), first
    if what in ("in place", "out of place"):
        assert (first == 3).all()
        assert (second == 3).all()
    if what == "own block":
        assert first.tolist() == second.tolist() == [[1] * size, [2] * size]


def test_without_check_mode_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "off")
    first, _ = outcomes("out of place", 200_001, write=True)
    assert not isinstance(first, CommError)
