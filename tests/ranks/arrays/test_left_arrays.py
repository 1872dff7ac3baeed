# SPDX-License-Identifier: Apache-2.0
"""Memory that a thread may not free is freed soon, by who may, and never grows."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, SimRanks, forget_ranks, kept_ranks

from commrt.comm import core_of
from commrt.devices import DeviceArray, SimWorld, ThreadDevice, arrays
from commrt.devices.arrays import free_what_was_left, freeing_nothing, give_back

SIZE = 1000


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def left(device: Any) -> int:
    """Return how many blocks of a device wait to be freed."""
    return len(device.__dict__.get(arrays._LEFT, ()))


def drop(kept: list[DeviceArray], *, elsewhere: bool = False) -> None:
    """Drop arrays where nothing may be freed; in another thread, if asked."""

    def run() -> None:
        with freeing_nothing():
            kept.clear()

    if not elsewhere:
        return run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return None


def most_live(world: SimWorld, device: Any, rounds: int) -> int:
    """Return the most bytes that were allocated while arrays came and were left."""
    most = 0
    for number in range(rounds):
        kept = [DeviceArray(device, SIZE, "u1"), DeviceArray(device, SIZE, "u1")]
        most = max(most, world.live_nbytes)
        drop(kept, elsewhere=number % 2 == 1)
    return most


def test_what_is_left_is_freed_before_more_is_allocated(full: bool) -> None:
    """So a program never has more than it would have had."""
    with SimWorld(seed=1) as world:
        device = world.device()
        most = most_live(world, device, 100_000 if full else 300)
        assert world.live_nbytes == 2 * SIZE  # of the last round
        assert most <= 4 * SIZE
        free_what_was_left(device)
        assert world.live_nbytes == 0
        assert not left(device)


def test_without_that_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "free_what_was_left", lambda device: None)
    world = SimWorld(seed=1)
    assert most_live(world, world.device(), 50) == 100 * SIZE


def test_of_arrays_that_were_freed_nothing_is_left() -> None:
    with SimWorld(seed=1) as world:
        device = world.device()
        kept = [DeviceArray(device, SIZE, "u1")]
        kept[0].free()
        drop(kept)
        assert not left(device)


def test_a_device_that_nobody_uses_again_is_let_go() -> None:
    """What was left of it goes with it."""
    with ThreadDevice() as device:
        kept = [DeviceArray(device, SIZE, "u1")]
        drop(kept)
        assert left(device) == 1
        gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None


def make(device: Any) -> None:
    DeviceArray(device, 1)


def free(device: Any) -> None:
    DeviceArray(device, 1).free()


@pytest.mark.parametrize("act", [make, free])
def test_another_device_is_left_alone(act: Callable[[Any], None]) -> None:
    """It may wait for what this thread does next."""
    world = SimWorld(seed=1)
    mine, other = world.device("mine"), world.device("other")
    kept = [DeviceArray(other, SIZE, "u1"), DeviceArray(mine, SIZE, "u1")]
    kept.append(DeviceArray(other, SIZE, "u1"))
    drop(kept)
    act(mine)
    assert (left(mine), left(other)) == (0, 2)
    act(other)
    assert left(other) == 0


@pytest.mark.parametrize("act", [make, free])
def test_a_device_that_waits_for_its_host_stops_no_other(
    act: Callable[[Any], None],
) -> None:
    """What was left of it would be freed once its stream goes on: a deadlock once."""
    world = SimWorld(seed=1)
    mine, other = world.device("mine"), world.device("other")
    gate = other.pinned_alloc(64)
    other.flag_store(gate, 0)
    stream = other.stream_create(0)
    other.wait_value32_geq(stream, gate, 1)
    kept = [DeviceArray(mine, SIZE), DeviceArray.__new__(DeviceArray)]
    drop(kept)
    with freeing_nothing():
        give_back(other, 0, gate)  # to free it waits for the stream
    act(mine)  # and this does not
    assert left(other) == 1
    other.flag_store(gate, 1)
    other.stream_synchronize(stream)
    world.check()


def test_who_may_free_nothing_frees_nothing_of_others() -> None:
    world = SimWorld(seed=1)
    device = world.device()
    drop([DeviceArray(device, SIZE, "u1")])
    with freeing_nothing():
        DeviceArray(device, 1)
        free_what_was_left(device)
        assert world.live_nbytes >= SIZE


def test_a_closed_communicator_leaves_nothing(seed: int) -> None:
    def main(rank: Rank) -> None:
        x = rank.array(np.ones(4, "f4"))
        rank.comm.allreduce(x)
        rank.finish()
        rank.stream.synchronize()
        rank.stream.destroy()
        with freeing_nothing():
            DeviceArray(rank.device, SIZE)

    ranks = SimRanks(2, seed)
    ranks.run(main)
    assert [left(rank.device) for rank in ranks.ranks] == [1, 1]
    for rank in ranks.ranks:
        core_of(rank.comm).devices.close()
    assert [left(rank.device) for rank in ranks.ranks] == [0, 0]
    ranks.close()


def test_a_communicator_that_is_dropped_there_stays_for_others(seed: int) -> None:
    """To close it gives pinned memory back, which waits for the device."""
    ranks = SimRanks(2, seed)
    dups = kept_ranks(2).each(lambda comm: comm.dup())
    for rank, comm in zip(ranks.ranks, dups, strict=True):
        core_of(comm).devices.stager(rank.device)
    before = ranks.world.live_nbytes
    worlds = [core_of(comm).world for comm in dups]
    del comm
    with freeing_nothing():
        dups.clear()
        gc.collect()
    assert ranks.world.live_nbytes == before
    assert [len(each.lingering) for each in worlds] == [1, 1]
    for each in worlds:
        each.free_lingering()
    gc.collect()
    assert ranks.world.live_nbytes < before - (2 << 20)
    ranks.close()


def test_a_call_frees_no_array_of_an_earlier_one(seed: int) -> None:
    """It may be what the device waits for; to free waits for the device."""

    def main(rank: Rank) -> None:
        device, gate = rank.device, rank.pin(64)
        device.flag_store(gate, 0)
        stream = device.stream_create(0)
        x = DeviceArray(device, 4, "f4").put(np.ones(4, "f4"))
        rank.comm.allreduce(x, stream=rank.stream, nonblocking=True).wait()
        y = rank.array(np.ones(4, "f4"))
        device.wait_value32_geq(stream, gate, 1)
        del x  # the call alone has it
        rank.comm.allreduce(y, nonblocking=True).synchronize()
        device.flag_store(gate, 1)
        device.stream_synchronize(stream)
        device.stream_destroy(stream)
        rank.finish()

    ranks = SimRanks(2, seed)
    ranks.run(main)
    assert [left(rank.device) for rank in ranks.ranks] == [1, 1]
    ranks.close()
