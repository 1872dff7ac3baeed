# SPDX-License-Identifier: Apache-2.0
"""Each switch of the simulated device is a trap of CUDA, and makes the difference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from commrt.devices import SimOptions, SimWorld, ThreadDevice
from commrt.errors import (
    CaptureError,
    DeviceError,
    DeviceFailedError,
    OrderingError,
    UsageError,
)
from commrt.kernels.boxes import BoxKind, move_table
from commrt.schedule.boxes import Box
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
FLOAT = dtype_by_name("float32").code
SEEDS = range(8)


def blocked(world: SimWorld) -> tuple[Any, int]:
    """A device one of whose streams waits for a flag that nobody has set."""
    device = world.device()
    flag, memory = device.pinned_alloc(4), device.pinned_alloc(256)
    device.write(memory, bytes(256))
    device.flag_store(flag, 0)
    device.wait_value32_geq(device.stream_create(), flag, 1)
    return device, memory


def reduces(device: Any, memory: int) -> None:
    stream = device.stream_create()
    device.launch_reduce(ReduceOp.SUM, FLOAT, memory, memory, 8, stream)


SYNCING: dict[str, tuple[str, Callable[[Any, int], object]]] = {
    "alloc": ("alloc_syncs", lambda device, memory: device.alloc(8)),
    "pinned_alloc": (
        "pinned_alloc_syncs",
        lambda device, memory: device.pinned_alloc(8),
    ),
    "pinned_free": (
        "pinned_alloc_syncs",
        lambda device, memory: device.pinned_free(memory),
    ),
    "first launch": ("first_launch_syncs", reduces),
}


@pytest.mark.parametrize("what", SYNCING)
def test_a_call_that_waits_for_the_device_is_a_deadlock_behind_a_wait(
    what: str,
) -> None:
    switch, call = SYNCING[what]
    for seed in SEEDS:
        device, memory = blocked(SimWorld(seed=seed))
        with pytest.raises(OrderingError, match="until device 'sim0' has done all"):
            call(device, memory)
        device, memory = blocked(SimWorld(seed=seed, **{switch: False}))
        call(device, memory)


def test_free_waits_for_the_device() -> None:
    for seed in SEEDS:
        for syncs in (True, False):
            world = SimWorld(seed=seed, free_syncs=syncs, alloc_syncs=False)
            device, _ = blocked(world)
            memory = device.alloc(8)
            if syncs:
                with pytest.raises(OrderingError, match="free until device"):
                    device.free(memory)
            else:
                device.free(memory)


def test_only_the_first_launch_of_a_kernel_waits_and_none_after_load_kernels() -> None:
    for seed in SEEDS:
        world = SimWorld(seed=seed)
        device = world.device()
        memory, flag = device.pinned_alloc(256), device.pinned_alloc(4)
        device.write(memory, bytes(256))
        reduces(device, memory)
        device.flag_store(flag, 0)
        device.wait_value32_geq(device.stream_create(), flag, 1)
        reduces(device, memory)  # loaded by now
        with pytest.raises(OrderingError, match="which loads it"):
            device.launch_copy(memory + 128, memory, 8, device.stream_create())
        world = SimWorld(seed=seed)
        device = world.device()
        memory, flag = device.pinned_alloc(256), device.pinned_alloc(4)
        device.flag_store(flag, 0)
        device.load_kernels(b"")
        device.wait_value32_geq(device.stream_create(), flag, 1)
        device.launch_copy(memory + 128, memory, 8, device.stream_create())


@pytest.mark.parametrize("written", ["the box", "beside it", "the table", "the buffer"])
@pytest.mark.parametrize("kind", [BoxKind.PACK, BoxKind.UNPACK])
def test_a_launch_of_boxes_touches_these_alone(kind: BoxKind, written: str) -> None:
    """Another stream writes meanwhile: a race where the launch reads or writes, too."""
    table = move_table([Box(0, (0, 2), (4, 4))], [(32, 4)], [4])
    for seed in SEEDS:
        world = SimWorld(seed=seed)
        device = world.device()
        device.load_kernels(b"")
        array, source = device.pinned_alloc(256), device.pinned_alloc(256)
        buffer, held = device.pinned_alloc(256), device.pinned_alloc(512)
        for memory in (array, source, buffer):
            device.write(memory, bytes(256))
        device.write(held, table.content)
        table.launch(device, kind, buffer, [array], held, device.stream_create())
        places = {"the box": array + 40, "beside it": array + 16, "the table": held}
        at = places.get(written, buffer)
        device.memcpy_async(at, source, 8, device.stream_create())
        while world.step():
            pass
        assert bool(world.violations) == (written != "beside it"), world.violations


@pytest.mark.parametrize("first_is_legacy", [True, False])
def test_the_legacy_stream_orders_blocking_streams(first_is_legacy: bool) -> None:
    def races(seed: int, blocking: bool, syncs: bool) -> bool:
        world = SimWorld(seed=seed, legacy_stream_syncs=syncs)
        device = world.device()
        memory, pinned = device.alloc(8), device.pinned_alloc(8)
        streams = [0, device.stream_create(0, blocking)]
        if not first_is_legacy:
            streams.reverse()
        for stream in streams:
            device.memcpy_async(memory, pinned, 8, stream)
        world.run_until_idle()
        return bool(world.violations)

    for seed in SEEDS:
        assert not races(seed, blocking=True, syncs=True)
        assert races(seed, blocking=True, syncs=False)
        assert races(seed, blocking=False, syncs=True)


def test_a_pageable_copy_takes_the_bytes_at_once_or_it_races() -> None:
    for seed in SEEDS:
        for blocks in (True, False):
            world = SimWorld(seed=seed, pageable_copies_block=blocks)
            device = world.device()
            source, memory = bytearray(b"12345678"), device.alloc(8)
            address = ctypes.addressof(ctypes.c_char.from_buffer(source))
            device.memcpy_async(memory, address, 8, device.stream_create())
            device.write(address, b"........")
            world.run_until_idle()
            assert bool(world.violations) == (not blocks)


def test_a_pageable_copy_waits_for_its_stream() -> None:
    source = bytearray(8)
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    for to_device in (True, False):
        for blocks in (True, False):
            world = SimWorld(pageable_copies_block=blocks, alloc_syncs=False)
            device, _ = blocked(world)
            memory = device.alloc(8)
            pair = (memory, address) if to_device else (address, memory)
            if blocks:
                with pytest.raises(OrderingError, match="pageable"):
                    device.memcpy_async(*pair, 8, 1)
            else:
                device.memcpy_async(*pair, 8, 1)


def test_a_copy_between_host_memory_waits_for_its_stream() -> None:
    """Pinned memory, too: so did an H200."""
    for blocks in (True, False):
        world = SimWorld(host_copies_block=blocks)
        device, memory = blocked(world)
        if blocks:
            with pytest.raises(OrderingError, match="between host memory"):
                device.memcpy_async(memory, memory + 128, 64, 1)
        else:
            device.memcpy_async(memory, memory + 128, 64, 1)


@pytest.mark.parametrize("most", [1, 5, 0])
def test_a_stream_takes_so_many_commands_and_then_its_caller_waits(most: int) -> None:
    """An H200's took 1020."""
    world = SimWorld(most_commands=most)
    device, memory = blocked(world)  # by its first command
    for _ in range(most - 1 if most else 3000):
        device.write_value32(1, memory, 1)
    if most:
        said = f"until stream .* takes a command: it holds {most}"
        with pytest.raises(OrderingError, match=said):
            device.write_value32(1, memory, 1)


def test_waiting_for_an_event_without_a_record_is_nothing_or_an_error() -> None:
    for passes in (True, False):
        world = SimWorld(unrecorded_wait_passes=passes)
        device = world.device()
        stream, event = device.stream_create(), device.event_create()
        if passes:
            device.stream_wait_event(stream, event)
        else:
            with pytest.raises(UsageError, match="never recorded"):
                device.stream_wait_event(stream, event)
        device.stream_synchronize(stream)


def test_a_wait_keeps_its_record_or_follows_the_event() -> None:
    for seed in SEEDS:
        for keeps in (True, False):
            world = SimWorld(seed=seed, wait_keeps_record=keeps, preempt=0)
            device = world.device()
            first, second = device.stream_create(), device.stream_create()
            flag, event = device.pinned_alloc(4), device.event_create()
            device.flag_store(flag, 0)
            device.event_record(event, first)
            device.stream_wait_event(second, event)
            device.wait_value32_geq(first, flag, 1)
            device.event_record(event, first)
            if keeps:
                device.stream_synchronize(second)
            else:
                with pytest.raises(OrderingError):
                    device.stream_synchronize(second)


@pytest.mark.parametrize("queues", [1, 2, 0])
def test_streams_of_one_queue_wait_for_each_other(queues: int) -> None:
    """Streams take the queues in turn: the third shares one with the first of two."""
    for seed in SEEDS:
        device, _ = blocked(SimWorld(seed=seed, queues=queues))  # stream 1
        free = device.stream_create()
        shares = device.stream_create()
        if queues == 1:
            device.event_record(device.event_create(), free)
        else:
            device.stream_synchronize(free)
        event = device.event_create()
        device.event_record(event, shares)
        if queues == 0:
            device.stream_synchronize(shares)
        else:
            with pytest.raises(OrderingError, match="of its hardware queue behind"):
                device.stream_synchronize(shares)


# --- capture ---


def captured(mode: int = GLOBAL, **switches: Any) -> tuple[Any, int, int, int]:
    """A device, a stream that it captures, an event and pinned memory."""
    device = SimWorld(**switches).device()
    stream, event = device.stream_create(), device.event_create()
    pinned = device.pinned_alloc(16)
    device.begin_capture(stream, mode)
    return device, stream, event, pinned


FORBIDDEN: dict[str, Callable[[Any, int, int, int], object]] = {
    "alloc": lambda device, *_: device.alloc(8),
    "pinned_alloc": lambda device, *_: device.pinned_alloc(8),
    "pinned_free": lambda device, stream, event, pinned: device.pinned_free(pinned),
    "event_query": lambda device, stream, event, pinned: device.event_query(event),
    "synchronize another": lambda device, *_: device.stream_synchronize(
        device.stream_create()
    ),
    "load_kernels": lambda device, *_: device.load_kernels(b""),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_forbidden_call_fails_and_ends_the_capture(what: str) -> None:
    device, stream, event, pinned = captured()
    assert device.is_capturing(stream) == 1
    with pytest.raises(CaptureError, match="the capture is lost"):
        FORBIDDEN[what](device, stream, event, pinned)
    assert device.is_capturing(stream) == 2
    with pytest.raises(CaptureError, match="was lost"):
        device.memcpy_async(pinned, pinned + 8, 8, stream)
    with pytest.raises(CaptureError, match="was lost"):
        device.end_capture(stream)
    assert device.is_capturing(stream) == 0
    device.alloc(8)


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("way", ["relaxed thread", "relaxed capture", "switch"])
def test_the_same_call_is_allowed_where_nothing_forbids_it(what: str, way: str) -> None:
    mode = RELAXED if way == "relaxed capture" else GLOBAL
    device, stream, event, pinned = captured(mode, capture_forbids=way != "switch")
    if way == "relaxed thread":
        assert device.exchange_capture_mode(RELAXED) == GLOBAL
    FORBIDDEN[what](device, stream, event, pinned)
    assert device.num_graph_commands(device.end_capture(stream)) == 0


@pytest.mark.parametrize("own_mode", [GLOBAL, THREAD_LOCAL])
@pytest.mark.parametrize("capture_mode", [GLOBAL, THREAD_LOCAL])
def test_another_thread_ends_a_global_capture_unless_it_looks_away(
    own_mode: int, capture_mode: int
) -> None:
    world = SimWorld()
    device = world.device()
    stream, flag = device.stream_create(), device.pinned_alloc(8)
    device.flag_store(flag, 0)
    device.flag_store(flag + 4, 0)

    def until(address: int) -> None:
        while not device.flag_load(address):
            device.pause()

    def user() -> bool:
        device.begin_capture(stream, capture_mode)
        device.flag_store(flag, 1)
        until(flag + 4)
        try:
            device.end_capture(stream)
        except CaptureError:
            return False
        return True

    def engine() -> bool:
        device.exchange_capture_mode(own_mode)
        until(flag)
        try:
            device.event_query(device.event_create())
        except CaptureError:
            return False
        finally:
            device.flag_store(flag + 4, 1)
        return True

    both = world.run({"user": user, "engine": engine})
    allowed = GLOBAL not in (own_mode, capture_mode) or own_mode != capture_mode
    assert both == {"user": allowed, "engine": allowed}


def test_captured_commands_are_counted_and_not_run() -> None:
    device, stream, event, pinned = captured()
    other = device.stream_create()
    device.write(pinned, bytes(range(16)))
    device.memcpy_async(pinned, pinned + 8, 8, stream)
    device.event_record(event, stream)
    device.stream_wait_event(other, event)  # it is captured, too, from here
    assert device.is_capturing(other) == 1
    device.memcpy_async(pinned, pinned + 8, 8, other)
    device.event_record(event, other)
    device.stream_wait_event(stream, event)
    assert device.capture_id(stream) == device.capture_id(other) > 0
    graph = device.end_capture(stream)
    assert device.num_graph_commands(graph) == 6
    assert device.is_capturing(other) == device.capture_id(other) == 0
    device.stream_synchronize(other)
    assert device.read(pinned, 16) == bytes(range(16))


def test_a_captured_stream_waits_for_nothing_outside_and_is_not_waited_for() -> None:
    device, stream, event, _ = captured(RELAXED)
    outside = device.stream_create()
    device.event_record(event, outside)
    with pytest.raises(CaptureError, match="not of the capture"):
        device.stream_wait_event(stream, event)
    device, stream, event, _ = captured(RELAXED)
    device.event_record(event, stream)
    with pytest.raises(CaptureError, match="recorded in a stream that is captured"):
        device.event_query(event)
    device, stream, event, _ = captured(RELAXED)
    with pytest.raises(CaptureError, match="stream_synchronize"):
        device.stream_synchronize(stream)
    device = SimWorld().device()
    blocking, pinned = device.stream_create(0, True), device.pinned_alloc(16)
    device.begin_capture(blocking, RELAXED)
    with pytest.raises(CaptureError, match="legacy stream"):
        device.memcpy_async(pinned, pinned + 8, 8, 0)


@pytest.mark.parametrize("joins", [True, False])
def test_what_a_graph_does_is_checked_as_all_else_is(joins: bool) -> None:
    """A launch is ordered with its stream, and with no other one."""
    world = SimWorld()
    device = world.device()
    stream, fork, other = (device.stream_create() for _ in range(3))
    event, launched = device.event_create(), device.event_create()
    first, second = device.pinned_alloc(8), device.pinned_alloc(8)
    device.write(first, bytes(8))
    device.begin_capture(stream)
    device.event_record(event, stream)
    device.stream_wait_event(fork, event)
    device.memcpy_async(second, first, 8, fork)
    device.event_record(event, fork)
    device.stream_wait_event(stream, event)
    graph = device.end_capture(stream)
    device.graph_launch(graph, stream)
    device.event_record(launched, stream)
    if joins:
        device.stream_wait_event(other, launched)
    device.memcpy_async(first, second, 8, other)
    world.run_until_idle()
    assert bool(world.violations) != joins


def test_a_graph_is_ended_where_it_began_and_holds_no_other() -> None:
    device = SimWorld().device()
    stream, other, event = (
        device.stream_create(),
        device.stream_create(),
        device.event_create(),
    )
    device.begin_capture(stream)
    graph = device.end_capture(stream)
    device.begin_capture(stream)
    with pytest.raises(DeviceError, match="graphs within graphs"):
        device.graph_launch(graph, stream)
    device.event_record(event, stream)
    device.stream_wait_event(other, event)
    with pytest.raises(UsageError, match=f"began with stream {stream}"):
        device.end_capture(other)
    with pytest.raises(UsageError, match="outside use event_record"):
        device.event_record_external(event, device.stream_create())
    device.graph_destroy(graph)
    for call in (device.graph_destroy, lambda gone: device.graph_launch(gone, 0)):
        with pytest.raises(UsageError, match="has no graph"):
            call(graph)
    with pytest.raises(UsageError, match="has ended"):
        device.stream_wait_event(device.stream_create(), lost_event(device))


def lost_event(device: Any) -> int:
    """An event that was recorded in a capture only."""
    stream, event = device.stream_create(), device.event_create()
    device.begin_capture(stream)
    device.event_record(event, stream)
    device.end_capture(stream)
    return int(event)


# --- failures ---


@pytest.mark.parametrize("kind", ["simulated", "threads"])
def test_after_an_error_of_a_command_every_call_fails(kind: str) -> None:
    threads = ThreadDevice()
    device: Any = SimWorld().device("gpu") if kind == "simulated" else threads
    stream, event = device.stream_create(), device.event_create()
    flags = device.pinned_alloc(32)
    gate = flags + 16
    for at in range(5):
        device.flag_store(flags + 4 * at, 0)
    device.fail_after(4)
    # Else a thread may have failed before the last command is given.
    device.wait_value32_geq(stream, gate, 1)
    for at in range(4):
        device.write_value32(stream, flags + 4 * at, 1)
    device.flag_store(gate, 1)
    with pytest.raises(DeviceFailedError, match="injected error") as caught:
        device.stream_synchronize(stream)
    assert caught.value.status == "failed"
    assert [device.flag_load(flags + 4 * at) for at in range(4)] == [1, 1, 0, 0]
    calls: tuple[Callable[[], object], ...] = (
        lambda: device.alloc(8),
        lambda: device.pinned_free(flags),
        lambda: device.event_record(event, stream),
        lambda: device.event_query(event),
        lambda: device.write_value32(stream, flags, 2),
        lambda: device.stream_destroy(stream),
    )
    for call in calls:
        with pytest.raises(DeviceFailedError):
            call()
    assert device.ptr_attributes(flags)[0] == 2, "host memory is still there"
    threads.close()


def test_another_device_goes_on_when_one_has_failed() -> None:
    world = SimWorld()
    bad, good = world.device(), world.device()
    bad.fail_after(1)
    flag = good.pinned_alloc(4)
    bad.write_value32(0, flag, 1)
    with pytest.raises(DeviceFailedError):
        bad.stream_synchronize(0)
    stream = good.stream_create()
    good.write_value32(stream, flag, 2)
    good.stream_synchronize(stream)
    assert good.flag_load(flag) == 2


@pytest.mark.parametrize("kind", ["simulated", "threads"])
def test_a_device_without_memory_flags_says_so(kind: str) -> None:
    threads = ThreadDevice(memory_flags=False)
    simulated = SimWorld(memory_flags=False).device()
    device: Any = simulated if kind == "simulated" else threads
    flag = device.pinned_alloc(4)
    assert not device.memory_flags
    for call in (device.write_value32, device.wait_value32_geq):
        with pytest.raises(DeviceError, match="poll events instead") as caught:
            call(0, flag, 1)
        assert caught.value.status == "unsupported"
    threads.close()


# --- memory of other processes ---


def exported(**switches: Any) -> tuple[SimWorld, Any, Any, int, bytes]:
    world = SimWorld(**switches)
    owner, other = world.device("owner", ordinal=0), world.device("other", ordinal=0)
    memory = owner.alloc(64)
    handle, _ = owner.ipc_export(memory)
    return world, owner, other, memory, handle


def test_memory_of_another_process_is_opened_used_and_closed() -> None:
    world, owner, other, memory, handle = exported()
    pinned = other.pinned_alloc(64)
    with pytest.raises(UsageError, match="has not opened it"):
        other.memcpy_async(pinned, memory, 64, 0)
    base = other.ipc_open(handle)
    with pytest.raises(UsageError, match="open already"):
        other.ipc_open(handle)
    other.memcpy_async(pinned, base, 64, 0)
    other.stream_synchronize(0)
    other.ipc_close(base)
    with pytest.raises(UsageError, match="not open"):
        other.ipc_close(base)
    owner.free(memory)
    with pytest.raises(UsageError, match="freed"):
        other.ipc_open(handle)
    world.check()


def test_freeing_before_the_other_has_closed_is_found() -> None:
    for checks in (True, False):
        world, owner, other, memory, handle = exported(ipc_checks=checks)
        other.ipc_open(handle)
        owner.free(memory)
        if checks:
            with pytest.raises(OrderingError, match="still has open"):
                world.check()
        else:
            world.check()


def test_closing_under_a_command_is_found() -> None:
    world, _, other, _, handle = exported(preempt=0)
    pinned = other.pinned_alloc(64)
    base = other.ipc_open(handle)
    other.memcpy_async(pinned, base, 64, 0)
    other.ipc_close(base)
    world.run_until_idle()
    with pytest.raises(OrderingError, match="has not opened it"):
        world.check()


# --- options ---


def test_an_unknown_option_is_an_error_that_names_the_known() -> None:
    with pytest.raises(UsageError, match="Known: seed, queues"):
        SimWorld(hardware_queues=2)


def test_every_option_reaches_the_engine() -> None:
    """An option that the binding does not take would be a switch without a wire."""
    from commrt._native import SimWorld as Native

    fields = SimOptions.__dataclass_fields__
    assert len(fields) == 18
    for name in fields:
        with pytest.raises((TypeError, RuntimeError)):
            Native({name: object()})


def test_run_returns_results_and_raises_the_error_that_is_the_cause() -> None:
    world = SimWorld()
    device = world.device()
    flag = device.pinned_alloc(4)
    device.flag_store(flag, 0)
    assert world.run({"one": lambda: 1, "two": lambda: 2}) == {"one": 1, "two": 2}

    def waits() -> None:
        while not device.flag_load(flag):
            device.pause()

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.run({"waits": waits, "fails": fails})
    assert "host thread 'waits' waits in pause()" in world.deadlock
