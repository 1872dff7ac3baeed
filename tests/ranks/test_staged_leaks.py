# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays leave nothing behind, however many there are."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from staged_ranks import Rank, SimRanks, forget_ranks

from commrt.devices import DeviceArray

IS_SANITIZED = "san.so" in os.environ.get("LD_PRELOAD", "")
"""Sanitizers keep freed memory, and books of their own."""
MOST = float("inf") if IS_SANITIZED else 1 << 20
"""Bytes: 300 for each call of the short run, a tenth for each of the long one."""
SHORT, LONG = 3_000, 10_000_000


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _calls(rank: Rank, arrays: list[DeviceArray], halo: Any, number: int) -> None:
    """Make ``number`` calls of all kinds; wait for them in several ways."""
    comm = rank.comm
    w, x, y, _ = arrays
    for turn in range(number // 4):
        requests = [
            comm.recv(y, source=0, nonblocking=True),
            comm.allreduce(x, nonblocking=True),
            comm.send(w, dest=0, nonblocking=True),
            halo.start(),
        ]
        for request in requests:
            if turn % 2:
                request.wait()
            request.synchronize()
    rank.stream.synchronize()


def _grown(number: int) -> int:
    """Return how many bytes larger this process is after so many calls."""
    ranks = SimRanks(1, 1, staging={"first_nbytes": 1 << 16}, preempt=0.0)
    rank = ranks.ranks[0]
    rank.begin()
    cart = rank.comm.cart((1,), periodic=True)
    with rank.stream:
        arrays = [DeviceArray(rank.device, 8) for _ in range(4)]
        rank.device.load_kernels(b"", [])
        halo = cart.plan.halo_exchange(arrays[-1], 1)
        _calls(rank, arrays, halo, 2_000)
        held = ranks.world.live_nbytes, rank.messages.pinned_nbytes
        before = _resident()
        _calls(rank, arrays, halo, number)
        grown = _resident() - before
        assert (ranks.world.live_nbytes, rank.messages.pinned_nbytes) == held
    assert rank.stager.num_events + rank.messages.num_events <= 8
    assert rank.comm._staging.outstanding == 0
    cart.free()
    rank.arrays += arrays
    ranks.close()  # nothing is left on the device
    return grown


def test_calls_leave_nothing_behind() -> None:
    assert _grown(SHORT) < MOST


@pytest.mark.full
@pytest.mark.timeout(6 * 3600)
def test_ten_million_calls_leave_nothing_behind() -> None:
    assert _grown(LONG) < MOST


def test_requests_may_outlive_their_communicator() -> None:
    """Their events go with them, on a device that nobody uses any more."""
    ranks = SimRanks(1, 2, staging={"first_nbytes": 1 << 16}, preempt=0.0)
    rank = ranks.ranks[0]
    rank.begin()
    comm = rank.comm.dup()
    stager = comm._staging.stager(rank.device)
    comm._staging.messages(rank.device)
    with rank.stream:
        w, x, y = (DeviceArray(rank.device, 8) for _ in range(3))
        kept = [
            comm.allreduce(x, nonblocking=True),
            comm.recv(y, source=0, nonblocking=True),
            comm.send(w, dest=0, nonblocking=True),
        ]
        for request in kept:
            request.wait()
            request.synchronize()
        comm.free()
        assert stager.num_events == 0
        assert [request.done for request in kept] == [True] * 3
        assert [request.wait() for request in kept] == [x, y, None]
        kept.clear()
        gc.collect()
        assert stager.num_events == 0  # given back, not kept for calls that never come
    rank.arrays += [w, x, y]
    ranks.close()
