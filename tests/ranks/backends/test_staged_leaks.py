# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays leave nothing behind, however many there are."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from simulated_leaks import Allowed, Counts, left, measure
from staged_ranks import SimRanks, forget_ranks

from commrt.comm import core_of
from commrt.devices import DeviceArray

IS_SANITIZED = "san.so" in os.environ.get("LD_PRELOAD", "")
"""Sanitizers keep freed memory, and books of their own."""
ALLOWED = Allowed(resident_nbytes=1 << 40) if IS_SANITIZED else Allowed()
SHORT, LONG = 4_000, 10_000_000
PLANTED = {
    "event_lost": ("bug", "events", 2_000),
    "memory_kept": ("bug", "pinned_nbytes", 12_000),
    "references_kept": ("bug", "references", 2_000),
    "block_lost": ("message_bug", "pinned_nbytes", 2_000),
}
"""Bugs, where they are planted, what there is too much of then, and by how many calls
that is seen: a ring that is full doubles."""


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def found(calls: int, seed: int, **plants: Any) -> Counts:
    """Return what calls of all kinds leave that they may not."""
    samples, work = measure(calls, seed, **plants)
    if not plants:
        work.close()
    assert samples[-1]["calls"] - samples[0]["calls"] >= calls
    assert {"waited for", "dropped", "truncated", "RevokedError"} <= work.ended.keys()
    return left(samples, ALLOWED)


def test_calls_of_all_kinds_leave_nothing_behind(seed: int) -> None:
    assert found(SHORT, seed) == {}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_leak_is_found(bug: str, seed: int) -> None:
    where, what, calls = PLANTED[bug]
    # To allocate does not wait: what does not come back is made anew.
    assert what in found(calls, seed, pinned_alloc_syncs=False, **{where: bug})
    forget_ranks()


@pytest.mark.full
@pytest.mark.timeout(6 * 3600)
def test_ten_million_calls_leave_nothing_behind() -> None:
    assert found(LONG, 1) == {}


def test_requests_may_outlive_their_communicator() -> None:
    """Their events go with them, on a device that nobody uses any more."""
    ranks = SimRanks(1, 2, staging={"first_nbytes": 1 << 16}, preempt=0.0)
    rank = ranks.ranks[0]
    rank.begin()
    comm = rank.comm.dup()
    stager = core_of(comm).devices.stager(rank.device)
    core_of(comm).devices.messages(rank.device)
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
