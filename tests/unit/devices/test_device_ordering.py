# SPDX-License-Identifier: Apache-2.0
"""The simulated device finds ordering bugs: all of them, in every run, by any seed.

``staged_model`` is a host-staged allreduce as the one that is built on devices, and has
its bugs, each of which must be caught for each seed and number of hardware queues.
Good code must pass them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import staged_model
from staged_model import BUGS, FAILING, MORE, ONE_QUEUE, SEVEN, WrongSumError

from commrt.devices import SimWorld, ThreadDevice
from commrt.errors import OrderingError

SEEDS, FULL_SEEDS = 5, 200
GOOD_SEEDS, FULL_GOOD_SEEDS = 25, 1000


class Simulated:
    """Two ranks on one simulated GPU."""

    def __init__(self, seed: int, queues: int, **switches: Any) -> None:
        self.world = SimWorld(seed=seed, queues=queues, **switches)
        self.devices = [self.world.device(f"rank {rank}", ordinal=0) for rank in (0, 1)]
        self.run = self.world.run


def verdict(seed: int, queues: int, bug: str | None, **switches: Any) -> str:
    """What is found: "", or any of "race", "deadlock" and "wrong"."""
    if bug == "freed":  # where free() waits for the device it does no harm
        switches["free_syncs"] = False
    two = Simulated(seed, queues, **switches)
    found = set()
    try:
        bugs = frozenset() if bug is None else frozenset({bug})
        staged_model.run(two, bugs, fails_at=3 if bug in FAILING else None)
    except WrongSumError:
        found.add("wrong")
    except OrderingError as error:
        found.add(error.status)
    if two.world.violations:
        found.add("race")
    return " and ".join(sorted(found))


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


@pytest.mark.parametrize("queues", [1, 2, 8])
@pytest.mark.parametrize("bug", SEVEN | MORE)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, seeds: range
) -> None:
    missed = [each for each in seeds if not verdict(each, queues, bug)]
    assert missed == [], f"not caught: {BUGS[bug]}"


@pytest.mark.parametrize("bug", SEVEN)
def test_the_seven_are_caught_by_the_order_alone(bug: str, seeds: range) -> None:
    """Whatever the numbers were: the race is reported, not only a wrong sum."""
    assert {"race" in verdict(each, 8, bug) for each in seeds} == {True}


@pytest.mark.parametrize("bug", ONE_QUEUE)
def test_what_needs_a_queue_of_its_own_is_a_deadlock_with_one(
    bug: str, seeds: range
) -> None:
    assert {verdict(each, 1, bug) for each in seeds} == {"deadlock"}


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
@pytest.mark.parametrize("fails_at", [None, 3])
def test_good_code_passes_with_every_seed(
    queues: int, fails_at: int | None, full: bool, seed: int
) -> None:
    for each in range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS)):
        two = Simulated(each, queues)
        ranks = staged_model.run(two, fails_at=fails_at)
        two.world.check()
        two.world.run_until_idle()
        assert [one.failed for one in ranks] == [int(fails_at is not None)] * 2


def test_numbers_alone_do_not_show_the_bug_that_the_checker_sees() -> None:
    """Why the checker: by most of these seeds the sums are right."""
    unchecked = [verdict(each, 8, "B3", check_order=False) for each in range(10)]
    assert unchecked.count("") > 5
    assert all("race" in verdict(each, 8, "B3") for each in range(10))


def test_a_seed_repeats_a_run(seed: int) -> None:
    def digest(with_seed: int) -> tuple[int, int]:
        two = Simulated(with_seed, 2)
        staged_model.run(two)
        return two.world.digest, two.world.commands

    assert digest(seed) == digest(seed)
    assert len({digest(each) for each in range(seed, seed + 20)}) > 1


def test_a_race_is_described_with_both_sides_and_where() -> None:
    world = SimWorld()
    device = world.device("gpu")
    first, second = device.stream_create(), device.stream_create()
    memory, pinned = device.alloc(64), device.pinned_alloc(64)
    device.memcpy_async(memory, pinned, 64, first)
    device.memcpy_async(pinned, memory + 32, 8, second)
    world.run_until_idle()
    with pytest.raises(OrderingError, match="seed 0, 8 hardware queues") as caught:
        world.check()
    assert caught.value.status == "race"
    text = str(caught.value)
    assert "memcpy_async (command 1) of stream 1 of device 'gpu'" in text
    assert "memcpy_async (command 2) of stream 2 of device 'gpu'" in text
    assert "bytes 32" in text


def test_a_deadlock_names_who_waits_for_what() -> None:
    world = SimWorld(queues=2)
    device = world.device("gpu")
    stream, other, event = (
        device.stream_create(),
        device.stream_create(),
        device.event_create(),
    )
    flag = device.pinned_alloc(4)
    device.flag_store(flag, 4)
    device.wait_value32_geq(stream, flag, 5)
    device.event_record(event, stream)
    device.stream_wait_event(other, event)
    with pytest.raises(OrderingError) as caught:
        device.stream_synchronize(other)
    assert caught.value.status == "deadlock"
    lines = str(caught.value).splitlines()
    assert lines[0] == "nothing can go on:"
    assert (
        "stream 2 of device 'gpu': stream_wait_event (command 3) waits for" in lines[1]
    )
    assert "event_record (command 2) of stream 1" in lines[1]
    assert f"the flag at {flag:#x} comes to 5; it is 4" in lines[2]
    assert "1 commands of its hardware queue behind" in lines[2]
    assert "host thread 'main' waits in stream_synchronize()" in lines[3]
    with pytest.raises(OrderingError):
        device.stream_create()  # the world has ended


def test_a_pause_that_nothing_ends_is_a_deadlock() -> None:
    world = SimWorld()
    device = world.device()
    device.flag_store(device.pinned_alloc(4), 1)
    device.pause()  # something has changed since the last one
    with pytest.raises(OrderingError, match=r"waits in pause\(\)"):
        device.pause()


# --- what orders, and what does not ---


def races(body: Callable[[SimWorld, Any], None], **switches: Any) -> bool:
    """Whether what ``body`` does is found to be a race; the same for all seeds."""
    found = set()
    for seed in range(10):
        world = SimWorld(seed=seed, **switches)
        body(world, world.device())
        world.run_until_idle()
        found.add(bool(world.violations))
    assert len(found) == 1, "it depends on the seed"
    return found.pop()


def two_threads(
    ordered: Callable[[Any, int, int], None], after: Callable[[Any, int, int], None]
) -> Callable[[SimWorld, Any], None]:
    """Thread one writes pinned memory, thread two reads it; with hand-offs of both."""

    def body(world: SimWorld, device: Any) -> None:
        memory, flag = device.pinned_alloc(64), device.pinned_alloc(4)
        device.flag_store(flag, 0)

        def one() -> None:
            device.write(memory, b"x" * 64)
            ordered(device, flag, memory)

        def two() -> None:
            after(device, flag, memory)
            device.read(memory, 64)

        world.run({"one": one, "two": two})

    return body


def nothing(device: Any, flag: int, memory: int) -> None:
    pass


def until_set(device: Any, flag: int, memory: int) -> None:
    while device.flag_load(flag) < 1:
        device.pause()


def set_flag(device: Any, flag: int, memory: int) -> None:
    device.flag_store(flag, 1)


def test_host_threads_without_a_hand_off_race() -> None:
    assert races(two_threads(nothing, nothing))


def test_a_flag_hands_over() -> None:
    assert not races(two_threads(set_flag, until_set))


def test_a_flag_that_is_not_looked_at_hands_nothing_over() -> None:
    assert races(two_threads(set_flag, nothing))


def test_a_lock_hands_over_to_who_takes_it_next() -> None:
    def body(world: SimWorld, device: Any) -> None:
        memory, lock = device.pinned_alloc(64), 1

        def add() -> None:
            for _ in range(4):
                device.lock(lock)
                device.write(memory, device.read(memory, 64))
                device.unlock(lock)

        world.run({"one": add, "two": add, "three": add})

    assert not races(body)


def test_other_locks_hand_nothing_over() -> None:
    def body(world: SimWorld, device: Any) -> None:
        memory = device.pinned_alloc(64)

        def write(lock: int) -> None:
            device.lock(lock)
            device.write(memory, b"y" * 64)
            device.unlock(lock)

        world.run({"one": lambda: write(1), "two": lambda: write(2)})

    assert races(body)


def test_a_wait_for_a_flag_knows_only_the_first_write_that_was_enough() -> None:
    """In some runs the second write comes before the wait; it cannot be counted on."""

    def body(world: SimWorld, device: Any) -> None:
        memory, target = device.pinned_alloc(64), device.alloc(64)
        flag, stream = device.pinned_alloc(4), device.stream_create()
        device.flag_store(flag, 0)
        device.wait_value32_geq(stream, flag, 1)
        device.memcpy_async(target, memory, 64, stream)
        device.flag_store(flag, 1)
        device.write(memory, b"z" * 64)
        device.flag_store(flag, 2)

    assert races(body)


def test_a_value_that_was_there_before_hands_nothing_over() -> None:
    """Who sees 1 again may have seen the 1 of before."""

    def body(begins_anew: bool) -> Callable[[SimWorld, Any], None]:
        def inner(world: SimWorld, device: Any) -> None:
            memory, flag = device.pinned_alloc(64), device.pinned_alloc(4)
            stream = device.stream_create()
            device.flag_store(flag, 1)
            if begins_anew:
                device.write(flag, bytes(4))
            else:
                device.flag_store(flag, 0)
            device.memcpy_async(memory, device.alloc(64), 64, stream)
            device.write_value32(stream, flag, 1)
            until_set(device, flag, memory)
            device.read(memory, 64)

        return inner

    assert races(body(begins_anew=False))
    assert not races(body(begins_anew=True))


def test_a_command_comes_after_what_its_giver_did_and_not_after_what_it_does() -> None:
    def before(world: SimWorld, device: Any) -> None:
        memory, stream = device.pinned_alloc(64), device.stream_create()
        device.write(memory, b"a" * 64)
        device.memcpy_async(device.alloc(64), memory, 64, stream)

    def after(world: SimWorld, device: Any) -> None:
        memory, stream = device.pinned_alloc(64), device.stream_create()
        on_device = device.alloc(64)
        device.memcpy_async(on_device, memory, 64, stream)
        device.write(memory, b"a" * 64)

    assert not races(before)
    assert races(after)


def test_reads_do_not_race_and_neighbours_do_not_either() -> None:
    def body(world: SimWorld, device: Any) -> None:
        memory, source = device.alloc(64), device.pinned_alloc(64)
        for at in range(0, 64, 16):
            device.memcpy_async(memory + at, source + at, 16, device.stream_create())

    def overlap(world: SimWorld, device: Any) -> None:
        memory, source = device.alloc(64), device.pinned_alloc(64)
        device.memcpy_async(memory, source, 17, device.stream_create())
        device.memcpy_async(memory + 16, source, 16, device.stream_create())

    assert not races(body)
    assert races(overlap)


def test_streams_that_share_a_queue_are_not_ordered_by_that() -> None:
    """They run one after the other here, and need not on another device."""

    def body(world: SimWorld, device: Any) -> None:
        memory, source = device.alloc(64), device.pinned_alloc(64)
        device.memcpy_async(memory, source, 64, device.stream_create())
        device.memcpy_async(memory, source, 64, device.stream_create())

    assert races(body, queues=1)


def test_memory_that_is_freed_under_a_command_is_found() -> None:
    world = SimWorld(free_syncs=False, preempt=0)
    device = world.device()
    stream, pinned, memory = (
        device.stream_create(),
        device.pinned_alloc(64),
        device.alloc(64),
    )
    device.memcpy_async(pinned, memory, 64, stream)
    device.free(memory)
    world.run_until_idle()
    with pytest.raises(OrderingError, match="was freed, after the command was given"):
        world.check()


def test_memory_is_poisoned_when_it_comes_and_when_it_goes() -> None:
    world = SimWorld(free_syncs=False, preempt=0)
    device = world.device()
    pinned = device.pinned_alloc(8)
    assert device.read(pinned, 8) == b"\xff" * 8
    target, memory = device.pinned_alloc(8), device.alloc(8)
    device.write(pinned, b"12345678")
    stream = device.stream_create()
    device.memcpy_async(memory, pinned, 8, stream)
    world.run_until_idle()
    device.memcpy_async(target, memory, 8, stream)
    device.free(memory)
    world.run_until_idle()
    assert device.read(target, 8) == b"\xff" * 8, "the late copy was not made"
    assert world.live_nbytes == 16


# --- the same model on threads ---


class Threads(staged_model.OnThreads):
    """Two ranks on devices of threads, with host threads as they are."""

    def __init__(self, seed: int, max_delay_us: int) -> None:
        self.devices = [
            ThreadDevice(seed=2 * seed + rank, max_delay_us=max_delay_us)
            for rank in range(2)
        ]

    def close(self) -> None:
        for device in self.devices:
            device.close()


@pytest.fixture(params=[0, 200], ids=["at once", "delayed"])
def threads(request: pytest.FixtureRequest, seed: int) -> Iterator[Threads]:
    both = Threads(seed, request.param)
    yield both
    both.close()


@pytest.mark.parametrize("fails_at", [None, 3])
def test_good_code_passes_on_threads(threads: Threads, fails_at: int | None) -> None:
    for _ in range(5):
        staged_model.run(threads, fails_at=fails_at)
