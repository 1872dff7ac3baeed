# SPDX-License-Identifier: Apache-2.0
"""Roots, reductions and peers by position, and receives from anyone, on devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_call_cache import calls_of_python
from staged_ranks import Rank, SimRanks, forget_ranks, on_threads


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def run(size: int, main: Any) -> None:
    """Run ``main(rank)`` on ranks that each have a simulated device."""
    ranks = SimRanks(size, 0)
    ranks.run(main)
    ranks.close()


def fetched(rank: Rank, array: Any) -> list[float]:
    """Return what an array on a device holds."""
    value = rank.fetch(array)
    rank.stream.synchronize()
    found: list[float] = value().tolist()
    return found


def test_roots_and_reductions_by_position_are_known_the_second_time() -> None:
    def main(rank: Rank) -> None:
        comm, last = rank.comm, rank.comm.size - 1
        for turn in range(3):
            x = rank.array(np.full(3, rank.rank, "f4"))
            with calls_of_python(comm) as looked_at:
                comm.bcast(x, last)
                comm.allreduce(x, "max")
            assert looked_at == ["bcast", "allreduce"] * (turn == 0)
            assert fetched(rank, x) == [last] * 3
            comm.reduce(x, np.add, last)
            every = last * comm.size if rank.rank == last else last
            assert fetched(rank, x) == [every] * 3
        rank.finish()

    run(3, main)


def test_a_message_from_anyone() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        if rank.rank:
            comm.send(rank.array(np.full(4, rank.rank, "f4")), 0, 5)
        for _ in range(0 if rank.rank else comm.size - 1):
            out = rank.array(np.zeros(4, "f4"))
            request = comm.recv(out, tag=5, nonblocking=True)
            assert request.wait() is out
            assert fetched(rank, out) == [request.source] * 4
            assert request.synchronize() is out

    on_threads(3, main)


def test_a_blocking_receive_from_anyone() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        if rank.rank:
            comm.send(rank.array(np.arange(4, dtype="f4")), 0)
        else:
            found = comm.probe()
            assert (found.source, found.nbytes, found.dtype) == (1, 16, "float32")
            out = rank.array(np.zeros(4, "f4"))
            assert comm.recv(out) is out
            assert fetched(rank, out) == [0, 1, 2, 3]

    on_threads(2, main)
