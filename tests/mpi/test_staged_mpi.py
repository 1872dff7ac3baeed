# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays between real ranks, on one node and across pretended nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import sample
from staged_cases import run_on_device

import commrt
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice
from commrt.vocabulary.operations import OPERATIONS


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
    env = {"COMMRT_NODES": where, "COMMRT_TIMEOUT_S": "300"} if where else {}
    found = mpirun(size, staged, env=env, seed=seed, memory_flags=memory_flags)
    assert found == [[]] * size


def without_plans(memory_flags: bool) -> list[str]:
    """Halos without plans, new ones beside known ones, and Python's reductions."""
    comm = commrt.init()
    me, size = comm.rank, comm.size
    largest = commrt.reduction(np.maximum, commutative=True)
    wrong = []
    with (
        comm.cart((size,), periodic=True) as cart,
        ThreadDevice(seed=me, memory_flags=memory_flags) as device,
        DeviceStream(device) as stream,
    ):
        for turn, dtype in enumerate(("f4", "f8", "f4", "f4")):
            values = np.full(6, -1, dtype)
            values[1:5] = me
            x = DeviceArray(device, 6, dtype).put(values)
            cart.halo_exchange(x, 1)
            if x.get().tolist() != [(me - 1) % size, *[me] * 4, (me + 1) % size]:
                wrong.append(f"rank {me}, halo {turn}: {x.get()}")
            y = DeviceArray(device, 4).put(np.full(4, me + turn))
            comm.allreduce(y, op=largest)
            if y.get().tolist() != [size - 1 + turn] * 4:
                wrong.append(f"rank {me}, reduction {turn}: {y.get()}")
        stream.synchronize()
    return wrong


@pytest.mark.parametrize("memory_flags", [True, False])
@pytest.mark.parametrize(("size", "where"), [(2, ""), (3, "2,1")])
def test_halos_without_plans_and_reductions_in_python(
    mpirun: Any, size: int, where: str, memory_flags: bool
) -> None:
    env = {"COMMRT_NODES": where, "COMMRT_TIMEOUT_S": "300"} if where else {}
    assert (
        mpirun(size, without_plans, env=env, memory_flags=memory_flags) == [[]] * size
    )


def ends_with_work() -> list[int]:
    """One rank's call never comes; both processes end all the same."""
    comm = commrt.init()
    device = ThreadDevice()
    stream = DeviceStream(device)
    if comm.rank == 0:
        with stream:
            comm.allreduce(DeviceArray(device, 8), nonblocking=True).wait()
    return [comm.rank]


def test_a_process_ends_with_streams_that_wait(mpirun: Any) -> None:
    assert mpirun(2, ends_with_work) == [[0], [1]]
