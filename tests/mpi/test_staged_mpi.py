# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays between real ranks, on one node and across pretended nodes."""

from __future__ import annotations

from typing import Any

import pytest
from cases import sample
from staged_cases import run_on_device

import commrt
from commrt.devices import DeviceStream, ThreadDevice
from commrt.operations import OPERATIONS


def staged(seed: int, memory_flags: bool) -> list[str]:
    comm = commrt.init()
    with ThreadDevice(
        seed=seed + comm.rank, max_delay_us=20, memory_flags=memory_flags
    ) as device:
        stream = DeviceStream(device)
        cases = [
            case
            for spec in OPERATIONS
            if spec.x_count != "none"
            for case in sample(spec.name, comm.size, seed, 3)
        ]
        with stream:
            wrong = run_on_device(comm, device, stream.handle, cases, 512)
        comm.free()
    return wrong


@pytest.mark.parametrize("memory_flags", [True, False])
@pytest.mark.parametrize(("size", "where"), [(2, ""), (3, "2,1")])
def test_every_operation(
    mpirun: Any, size: int, where: str, memory_flags: bool, seed: int
) -> None:
    env = {"COMMRT_NODES": where, "COMMRT_TIMEOUT_S": "20"} if where else {}
    found = mpirun(size, staged, env=env, seed=seed, memory_flags=memory_flags)
    assert found == [[]] * size


def ends_with_work() -> list[int]:
    """One rank's call never comes; both processes end all the same."""
    comm = commrt.init()
    device = ThreadDevice()
    from commrt.devices import DeviceArray

    stream = DeviceStream(device)
    if comm.rank == 0:
        with stream:
            comm.allreduce(DeviceArray(device, 8), nonblocking=True).wait()
    return [comm.rank]


def test_a_process_ends_with_streams_that_wait(mpirun: Any) -> None:
    assert mpirun(2, ends_with_work) == [[0], [1]]
