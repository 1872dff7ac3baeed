# SPDX-License-Identifier: Apache-2.0
"""Memory of devices that is freed while a call has it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from staged_ranks import Rank, forget_ranks, on_threads
from test_device_requests import failure, on_device, ones

from commrt.comm import core_of
from commrt.device_calls.requests import DeviceRequest
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


@pytest.fixture
def without_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")


@pytest.mark.usefixtures("without_thread")
def test_without_progress_no_stream_waits_for_the_program() -> None:
    """Who only synchronizes its stream ends, in other ranks' time."""

    def main(rank: Rank) -> list[float]:
        x, y = ones(rank), ones(rank)
        request = rank.comm.allreduce(x, nonblocking=True)
        rank.stream.synchronize()  # before anybody has waited for the call
        assert isinstance(request, DeviceRequest)
        assert not core_of(rank.comm).world.engine.has_thread
        request.wait()
        rank.comm.allreduce(y)
        found = [rank.fetch(each) for each in (x, y)]
        rank.stream.synchronize()
        rank.finish()
        return [float(value()[0]) for value in found]

    assert on_threads(2, main) == [[3.0, 3.0]] * 2


@pytest.mark.usefixtures("without_thread")
def test_without_progress_freeing_in_flight_is_refused() -> None:
    """The array is as it was, and can be freed once the call is done."""

    def main(rank: Rank) -> None:
        x, y = DeviceArray(rank.device, 8), DeviceArray(rank.device, 8)
        rank.comm.barrier()
        if rank.rank == 1:
            rank.comm.recv(np.empty(1), source=0)
        request = rank.comm.allreduce(x, nonblocking=True)
        if rank.rank == 0:
            with pytest.raises(UsageError, match=r"no progress thread.*synchronize\("):
                x.free()
            assert x.address
            rank.comm.send(np.empty(1), dest=1)
        request.synchronize()
        x.free()
        with pytest.raises(UsageError, match="freed"):
            rank.comm.allreduce(x)
        y.free()
        y.free()

    on_threads(2, main)


@pytest.mark.usefixtures("without_thread")
def test_without_progress_a_bucket_is_sent_without_waiting_for_peers() -> None:
    """The other rank comes only after a message that follows."""

    def main(rank: Rank) -> float:
        comm, x = rank.comm, ones(rank)
        comm.barrier()
        if rank.rank == 1:
            comm.recv(np.empty(1), source=0)
        with comm.fused():
            request = comm.allreduce(x, nonblocking=True)
        if rank.rank == 0:
            comm.send(np.empty(1), dest=1)
        request.wait()
        value = rank.fetch(x)
        rank.stream.synchronize()
        request.synchronize()
        return float(value()[0])

    assert on_threads(2, main) == [3.0, 3.0]
