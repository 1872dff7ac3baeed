# SPDX-License-Identifier: Apache-2.0
"""Memory of devices that is freed while a call has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from staged_ranks import Rank, forget_ranks, on_threads
from test_device_requests import failure, on_device, ones

from commrt.devices import DeviceArray
from commrt.errors import UsageError


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def test_memory_that_is_freed_in_flight_goes_once_the_device_is_done_with_it() -> None:
    """To free waits for what the device was given, which others let go on."""

    def main(rank: Rank) -> None:
        x, other = DeviceArray(rank.device, 8), ones(rank)
        request = rank.comm.allreduce(x, nonblocking=True)
        x.free()
        request.synchronize()
        with pytest.raises(UsageError, match="freed"):
            rank.comm.allreduce(x)
        rank.comm.allreduce(other)
        value = rank.fetch(other)
        rank.stream.synchronize()
        assert value().tolist() == [3.0] * 8
        rank.finish()

    for seed in range(10):
        on_device(main, seed)
    on_threads(2, main)


def test_memory_that_is_freed_though_a_peer_does_not_come_goes_at_the_limit() -> None:
    def main(rank: Rank) -> str:
        lost = rank.comm.dup()
        x = ones(rank)
        rank.comm.allreduce(x)
        rank.stream.synchronize()
        if rank.rank == 1:
            return "TimeoutError_"
        y = DeviceArray(rank.device, 8)
        request = lost.allreduce(y, nonblocking=True, timeout_s=0.2)
        y.free()
        return failure(request)

    assert on_threads(2, main, survives=False) == ["TimeoutError_"] * 2
