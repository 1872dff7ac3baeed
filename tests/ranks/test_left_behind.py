# SPDX-License-Identifier: Apache-2.0
"""What failed communicators held on a device comes back, and not too early."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from staged_ranks import (
    Rank,
    SimRanks,
    forget_ranks,
    kept_ranks,
    on_threads,
    renew_ranks,
)

from commrt.comm import Communicator
from commrt.device_calls.left_behind import give_back
from commrt.devices import DeviceArray
from commrt.errors import CommError, OrderingError

AT_ONCE, MANY, FULL_MANY = 10, 2, 100
"""Communicators that fail in a run, and runs."""
F = np.float32


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def dups(number: int) -> list[list[Communicator]]:
    """Return so many more communicators of each rank."""
    return kept_ranks(2).each(lambda comm: [comm.dup() for _ in range(number)])


def left(ranks: SimRanks) -> dict[str, int]:
    """Give back what can be by now; return what is left in the world."""
    gc.collect()  # an error and its request hold each other
    ranks.world.run_until_idle()
    for rank in ranks.ranks:
        give_back(rank.comm._world)
    ranks.world.run_until_idle()
    found = ranks.world.live
    return {name: found[name] for name in ("blocks", "nbytes", "streams", "events")}


def fail(rank: Rank, comm: Communicator) -> None:
    """Let a communicator fail: its ranks call with different lengths."""
    x = DeviceArray(rank.device, 5 + rank.rank, F)
    rank.arrays.append(x)
    request = comm.allreduce(x, nonblocking=True)
    with pytest.raises(CommError):
        request.synchronize()
    with pytest.raises(CommError):
        request.wait()


def free_arrays(rank: Rank) -> None:
    while rank.arrays:
        rank.arrays.pop().free()


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
def test_a_thousand_failed_communicators_leave_nothing(
    flags: bool, full: bool, seed: int
) -> None:
    ranks = SimRanks(2, seed, memory_flags=flags, preempt=0.05)
    before = left(ranks)
    for _ in range(FULL_MANY if full else MANY):
        groups = dups(AT_ONCE)

        def main(rank: Rank, groups: Any = groups) -> None:
            for comm in groups[rank.rank]:
                fail(rank, comm)
            rank.finish()
            rank.stream.synchronize()
            rank.stream.destroy()

        for rank in ranks.ranks:
            rank.device.flag_store(rank.stop, 0)
        ranks.run(main)
        for rank in ranks.ranks:
            free_arrays(rank)
            for comm in groups[rank.rank]:
                comm.free()
        assert left(ranks) == before
        assert not any(rank.comm._world.left_behind for rank in ranks.ranks)
    ranks.close()


def stuck(ranks: SimRanks, bug: str | None = None) -> int:
    """Free a communicator that failed with a copy in its streams; return its gate.

    The copy comes after the caller's stream, which waits for the gate.
    """
    gate = ranks.ranks[0].pin(64)
    ranks.ranks[0].device.flag_store(gate, 0)
    groups = dups(1)

    def main(rank: Rank) -> None:
        [comm] = groups[rank.rank]
        if bug is not None:
            comm._staging.stager(rank.device).plant(bug)
        x = DeviceArray(rank.device, 8, F)
        rank.arrays.append(x)
        comm._staging.stager(rank.device)
        rank.device.wait_value32_geq(rank.stream.handle, gate, 1)
        request = comm.allreduce(x, nonblocking=True)
        comm.give_up("it was told to")
        with pytest.raises(CommError, match="it was told to"):
            request.synchronize()

    ranks.run(main)
    for group in groups:
        for comm in group:
            comm.free()
    return gate


def test_nothing_comes_back_while_a_stream_holds_it(seed: int) -> None:
    ranks = SimRanks(2, seed, 0)
    before = ranks.world.live["nbytes"]
    gate = stuck(ranks)
    for rank in ranks.ranks:
        give_back(rank.comm._world)
        assert len(rank.comm._world.left_behind) == 1
    assert ranks.world.live["nbytes"] > before + (2 << 20)
    ranks.ranks[0].device.flag_store(gate, 1)
    left(ranks)
    assert not any(rank.comm._world.left_behind for rank in ranks.ranks)
    for rank in ranks.ranks:
        free_arrays(rank)
        rank.stream.destroy()
    ranks.close()


@pytest.mark.parametrize("syncs", [True, False], ids=["waits", "at once"])
def test_what_is_given_back_too_early_is_found(syncs: bool, seed: int) -> None:
    """Freeing waits for the device for ever, or frees what a copy is to write."""
    switches = {"pinned_alloc_syncs": syncs, "free_syncs": syncs}
    ranks = SimRanks(2, seed, 0, **switches)
    found = False
    try:
        gate = stuck(ranks, "given_back_early")
        ranks.ranks[0].device.flag_store(gate, 1)
        left(ranks)
    except OrderingError:
        found = True
    assert found or ranks.world.violations
    for rank in ranks.ranks:
        rank.comm._world.left_behind.clear()
    renew_ranks()


def test_messages_that_may_still_come_keep_their_memory(seed: int) -> None:
    """Until the communicator is gone, and with it who would receive them."""
    ranks = SimRanks(2, seed)
    groups = dups(1)

    def main(rank: Rank) -> None:
        [comm] = groups[rank.rank]
        x = DeviceArray(rank.device, 8, F)
        rank.arrays.append(x)
        request = comm.recv(x, source=1 - rank.rank, nonblocking=True)
        comm.give_up("it was told to")
        with pytest.raises(CommError):
            request.synchronize()
        rank.stream.synchronize()
        rank.stream.destroy()

    ranks.run(main)
    for group in groups:
        group[0].free()
    left(ranks)
    assert [len(rank.comm._world.left_behind) for rank in ranks.ranks] == [1, 1]
    del group
    groups.clear()
    gc.collect()
    left(ranks)
    assert not any(rank.comm._world.left_behind for rank in ranks.ranks)
    for rank in ranks.ranks:
        free_arrays(rank)
    ranks.close()


def test_to_free_lets_go_what_nobody_made_progress_for(seed: int) -> None:
    """A receive is under way on a communicator that failed by something else."""
    ranks = SimRanks(2, seed)
    groups = dups(1)

    def main(rank: Rank) -> None:
        [comm] = groups[rank.rank]
        x = DeviceArray(rank.device, 8, F)
        rank.arrays.append(x)
        request = comm.recv(x, source=1 - rank.rank, nonblocking=True)
        request.wait()  # the stream waits for it
        with pytest.raises(CommError):
            comm.allreduce(np.ones(3 + rank.rank), timeout_s=0.01)
        comm.free()
        with pytest.raises(CommError):
            request.synchronize()
        rank.stream.synchronize()  # a deadlock where it is not let go
        rank.stream.destroy()

    ranks.run(main)
    groups.clear()
    gc.collect()
    left(ranks)
    for rank in ranks.ranks:
        free_arrays(rank)
    ranks.close()


def test_on_devices_of_threads_a_rank_that_came_too_late_costs_nothing() -> None:
    def main(rank: Rank) -> None:
        lost = rank.comm.dup()
        lost._staging.stager(rank.device)
        x = DeviceArray(rank.device, 8, F)
        if rank.rank == 0:
            request = lost.allreduce(x, nonblocking=True, timeout_s=0.05)
            with pytest.raises(CommError):
                request.synchronize(timeout_s=20)
        lost.give_up("enough")
        lost.free()
        deadline = time.monotonic() + 20
        while rank.comm._world.left_behind:
            assert time.monotonic() < deadline
            give_back(rank.comm._world)
        x.free()

    on_threads(2, main)
