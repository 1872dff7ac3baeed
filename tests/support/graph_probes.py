# SPDX-License-Identifier: Apache-2.0
"""What every device must do with graphs: probes such as those in ``device_probes``."""

from __future__ import annotations

from typing import Any

import pytest
from device_probes import NBYTES, Rig, data

from commrt.errors import CaptureError

__all__ = ["GRAPH_PROBES"]

RELAXED = 2


def filled(rig: Rig, number: int) -> int:
    """Memory of the device that holds ``data(number)``; the stream of it is done."""
    device = rig.device
    memory: int = device.alloc(NBYTES)
    stream = device.stream_create()
    device.memcpy_async(memory, rig.pinned(data(number)), NBYTES, stream)
    device.stream_synchronize(stream)
    return memory


def held(rig: Rig, memory: int, stream: int) -> bytes:
    """What memory of the device holds behind all that a stream was given."""
    device, target = rig.device, rig.pinned()
    device.memcpy_async(target, memory, NBYTES, stream)
    device.stream_synchronize(stream)
    found: bytes = device.read(target, NBYTES)
    return found


def a_graph_runs_what_was_captured_at_each_launch(rig: Rig) -> None:
    device = rig.device
    stream, other = device.stream_create(), device.stream_create()
    source, target = filled(rig, 1), filled(rig, 2)
    assert device.capture_id(stream) == 0
    device.begin_capture(stream, RELAXED)
    assert device.is_capturing(stream) == 1
    assert device.capture_id(stream) != 0
    device.memcpy_async(target, source, NBYTES, stream)
    graph = device.end_capture(stream)
    assert device.is_capturing(stream) == device.capture_id(stream) == 0
    assert held(rig, target, stream) == data(2)
    device.graph_launch(graph, other)
    assert held(rig, target, other) == data(1)
    device.memcpy_async(source, rig.pinned(data(3)), NBYTES, stream)
    device.graph_launch(graph, stream)  # behind what the stream was given
    device.graph_destroy(graph)  # what was launched still runs
    assert held(rig, target, stream) == data(3)


def a_capture_forks_and_joins_by_events(rig: Rig) -> None:
    device = rig.device
    stream, other = device.stream_create(), device.stream_create()
    event, joined = device.event_create(), device.event_create()
    first, second, third = filled(rig, 1), filled(rig, 2), filled(rig, 3)
    device.begin_capture(stream, RELAXED)
    device.memcpy_async(second, first, NBYTES, stream)
    device.event_record(event, stream)
    device.stream_wait_event(other, event)
    assert device.capture_id(other) == device.capture_id(stream)
    device.memcpy_async(third, second, NBYTES, other)
    device.event_record(joined, other)
    device.stream_wait_event(stream, joined)
    graph = device.end_capture(stream)
    assert device.capture_id(other) == 0
    for number in (4, 5):
        device.memcpy_async(first, rig.pinned(data(number)), NBYTES, stream)
        device.graph_launch(graph, stream)
    assert held(rig, third, stream) == data(5)
    device.graph_destroy(graph)


def a_fork_that_does_not_come_back_is_an_error(rig: Rig) -> None:
    device = rig.device
    stream, other = device.stream_create(), device.stream_create()
    event = device.event_create()
    first, second = filled(rig, 1), filled(rig, 2)
    device.begin_capture(stream, RELAXED)
    device.event_record(event, stream)
    device.stream_wait_event(other, event)
    device.memcpy_async(second, first, NBYTES, other)
    with pytest.raises(CaptureError):
        device.end_capture(stream)
    assert device.is_capturing(stream) == 0
    assert held(rig, second, stream) == data(2)


def launches_of_a_graph_run_one_after_the_other(rig: Rig) -> None:
    device = rig.device
    streams = [device.stream_create() for _ in range(2)]
    first, second = filled(rig, 1), filled(rig, 2)
    device.begin_capture(streams[0], RELAXED)
    device.memcpy_async(second, first, NBYTES, streams[0])
    device.memcpy_async(first, second, NBYTES, streams[0])
    graph = device.end_capture(streams[0])
    for number in range(4):
        device.graph_launch(graph, streams[number % 2])
    device.graph_launch(graph, streams[0])
    assert held(rig, second, streams[0]) == data(1)
    device.graph_destroy(graph)


def a_launch_waits_for_an_event_of_outside_and_records_one(rig: Rig) -> None:
    device = rig.device
    stream, before, after = (device.stream_create() for _ in range(3))
    ready, done = device.event_create(), device.event_create()
    first, second = filled(rig, 1), filled(rig, 2)
    device.begin_capture(stream, RELAXED)
    device.stream_wait_external(stream, ready)
    device.memcpy_async(second, first, NBYTES, stream)
    device.event_record_external(done, stream)
    graph = device.end_capture(stream)
    for number in (4, 5):
        device.memcpy_async(first, rig.pinned(data(number)), NBYTES, before)
        device.event_record(ready, before)
        device.graph_launch(graph, stream)
        device.stream_wait_event(after, done)
        assert held(rig, second, after) == data(number)
    device.graph_destroy(graph)


def what_would_break_a_capture_ends_it(rig: Rig) -> None:
    device = rig.device
    stream, outside = device.stream_create(), device.stream_create()
    event = device.event_create()

    def lost(call: Any) -> None:
        device.begin_capture(stream, RELAXED)
        device.event_record(event, stream)
        with pytest.raises(CaptureError):
            call()
        assert device.is_capturing(stream) == 2
        with pytest.raises(CaptureError):
            device.end_capture(stream)

    def waits_for_outside() -> None:
        device.event_record(event, outside)
        device.stream_wait_event(stream, event)

    lost(lambda: device.stream_synchronize(stream))
    lost(lambda: device.event_query(event))
    lost(waits_for_outside)


GRAPH_PROBES = (
    a_graph_runs_what_was_captured_at_each_launch,
    a_capture_forks_and_joins_by_events,
    a_fork_that_does_not_come_back_is_an_error,
    launches_of_a_graph_run_one_after_the_other,
    a_launch_waits_for_an_event_of_outside_and_records_one,
    what_would_break_a_capture_ends_it,
)
