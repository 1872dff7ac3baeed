# SPDX-License-Identifier: Apache-2.0
"""Operations on a simulated device leave nothing behind, however many.

Not for sanitizers, which keep what is freed.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from commrt.devices import SimWorld

MOST = 1 << 20
"""Bytes: 52 for each operation of the short run, one for each of the long one."""


def _operations(world: SimWorld, device: Any, number: int) -> None:
    """Give a device ``number`` staged operations, with all that comes and goes."""
    there, back = device.stream_create(), device.stream_create()
    pinned, flags = device.pinned_alloc(64), device.pinned_alloc(128)
    start, go = flags, flags + 64
    device.write(flags, bytes(128))
    for value in range(1, number + 1):
        memory, event = device.alloc(64), device.event_create()
        device.memcpy_async(pinned, memory, 64, there)
        device.write_value32(there, start, value)
        device.event_record(event, there)
        device.stream_wait_event(back, event)
        device.wait_value32_geq(back, go, value)
        device.memcpy_async(memory, pinned, 64, back)
        while device.flag_load(start) < value:
            device.pause()
        device.write(pinned, device.read(pinned, 64))
        device.flag_store(go, value)
        device.event_record(event, back)
        device.stream_wait_event(there, event)
        device.event_destroy(event)
        device.free(memory)
        if value % 100 == 0:
            device.stream_destroy(back)
            back = device.stream_create()
    device.pinned_free(flags)
    device.pinned_free(pinned)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _grown(number: int) -> int:
    """Return how many bytes larger this process is after so many operations."""
    with SimWorld(seed=1) as world:
        device = world.device()
        _operations(world, device, 5_000)
        before = _resident()
        _operations(world, device, number)
        grown = _resident() - before
        world.run_until_idle()
        assert world.live_nbytes == 0
    return grown


def test_operations_leave_no_memory_behind() -> None:
    assert _grown(20_000) < MOST


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_million_operations_leave_no_memory_behind() -> None:
    assert _grown(1_000_000) < MOST
