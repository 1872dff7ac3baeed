# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads: the harness itself, and that the engine is right under it."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from commrt.comm import Communicator, core_of
from commrt.errors import CommError, PeerFailedError, RevokedError
from commrt.local import run


def test_results_come_in_rank_order() -> None:
    assert run(4, lambda comm: (comm.rank, comm.size), timeout_s=300) == [
        (rank, 4) for rank in range(4)
    ]


def test_the_first_error_is_raised_and_wakes_the_ranks_that_wait() -> None:
    def rank_main(comm) -> None:
        if comm.rank == 1:
            raise KeyError("no such batch")
        core_of(comm).world.bootstrap.exchange(range(comm.size), "never", b"", 600)

    with pytest.raises(KeyError, match="no such batch"):
        run(3, rank_main, timeout_s=300)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [5001, 200_003])
@pytest.mark.parametrize("fails", ["sender", "receiver"])
def test_a_message_that_was_begun_does_not_hang_by_a_rank_that_fails(
    size: int, count: int, fails: str
) -> None:
    begun = threading.Barrier(size)
    outcomes: list[str] = []
    left: list[Any] = []
    failing = 1 if fails == "sender" else 0

    def rank_main(comm) -> None:
        request = None
        if comm.rank == 0:
            request = comm.recv(np.empty(count), source=1, nonblocking=True)
        elif comm.rank == 1:
            request = comm.send(np.ones(count), 0, nonblocking=True)
        begun.wait(240)
        if request is not None:
            request.test()
        begun.wait(240)
        if comm.rank == failing:
            left.append(request)
            raise KeyError("no such batch")
        if request is None:
            return
        try:
            result = request.wait(timeout_s=240)
            outcomes.append("right" if fails == "receiver" or all(result) else "wrong")
        except (PeerFailedError, RevokedError) as error:
            outcomes.append(
                f"rank {failing}" if f"rank {failing}" in str(error) else ""
            )

    with pytest.raises(KeyError, match="no such batch"):
        run(size, rank_main, timeout_s=600)
    assert outcomes in (["right"], [f"rank {failing}"])
    with suppress(CommError):
        left[0].wait(timeout_s=240)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 1000, 200_003])
def test_every_rank_gets_the_same_sum(size: int, count: int) -> None:
    def rank_main(comm) -> bool:
        x = np.arange(count, dtype=np.float64) + comm.rank
        total = comm.allreduce(x)
        expected = size * np.arange(count) + size * (size - 1) / 2
        return bool(np.array_equal(total, expected))

    assert all(run(size, rank_main, timeout_s=300))


def test_operations_in_flight_complete_in_any_order() -> None:
    def rank_main(comm) -> list[float]:
        arrays = [np.full(5000, float(i + comm.rank)) for i in range(8)]
        requests = [comm.allreduce(array, nonblocking=True) for array in arrays]
        order = requests if comm.rank == 0 else requests[::-1]
        for request in order:
            request.wait()
        return [float(array[-1]) for array in arrays]

    expected = [3.0 * i + 3 for i in range(8)]
    assert run(3, rank_main, timeout_s=300) == [expected] * 3


def test_run_leaves_no_thread_when_a_rank_misuses_the_communicator() -> None:
    def rank_main(comm) -> None:
        comm.allreduce(np.ones(4)[::2])

    with pytest.raises(CommError):
        run(2, rank_main, timeout_s=300)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("rank") for name in names)


def test_a_rank_that_fails_after_free_raises_its_own_error() -> None:
    def main(comm: Communicator) -> None:
        comm.free()
        raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        run(2, main)
