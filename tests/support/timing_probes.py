# SPDX-License-Identifier: Apache-2.0
"""What the time between two events of a device means; see ``device_probes``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from device_probes import Rig

from commrt.errors import CommError, DeviceError

__all__ = ["TIMING_PROBES"]


def timed_events_tell_what_lies_between(rig: Rig) -> None:
    device = rig.device
    stream, gate = device.stream_create(), rig.flag()
    before, after = device.timed_event_create(), device.timed_event_create()
    plain = device.event_create()
    device.event_record(before, stream)
    device.event_record(plain, stream)
    device.wait_value32_geq(stream, gate, 1)
    device.event_record(after, stream)
    if rig.kind == "simulated":
        with pytest.raises(DeviceError, match="take no time") as none:
            device.event_elapsed(before, after)
        assert none.value.status == "unsupported"
        device.flag_store(gate, 1)
        return
    with pytest.raises(DeviceError) as early:
        device.event_elapsed(before, after)
    assert early.value.status == "not_ready"
    device.flag_store(gate, 1)
    device.stream_synchronize(stream)
    assert device.event_elapsed(before, after) > 0
    assert device.event_elapsed(before, before) == 0
    assert device.event_elapsed(after, before) < 0
    with pytest.raises(CommError):
        device.event_elapsed(before, plain)  # which has no time
    with pytest.raises(CommError):
        device.event_elapsed(before, device.timed_event_create())  # nor a record


TIMING_PROBES: tuple[Callable[[Rig], None], ...] = (
    timed_events_tell_what_lies_between,
)
