# SPDX-License-Identifier: Apache-2.0
"""Real MPI libraries are given memory of devices of threads, which is the host's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import Case, sample
from staged_cases import run_on_device

import commrt
from commrt.backends.mpi import attached as mpi_calls
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice
from commrt.vocabulary.operations import OPERATIONS


def given_as_they_lie(seed: int, memory_flags: bool) -> list[str]:
    """Every operation, in all forms; what MPI cannot do runs staged."""
    mpi_calls.KINDS.add("threads")
    comm = commrt.init()
    wrong = []
    with ThreadDevice(
        seed=seed + comm.rank, max_delay_us=20, memory_flags=memory_flags
    ) as device:
        stream = DeviceStream(device)
        cases = [
            case
            for spec in OPERATIONS
            if spec.x_count != "none"
            for case in [
                *sample(spec.name, comm.size, seed, 2),
                *(
                    Case(spec.name, comm.size, root=1, count=count, in_place=in_place)
                    for count, in_place in ((0, True), (1, False), (5001, True))
                ),
            ]
        ]
        cases = [replace(case, algorithm=None, params={}) for case in cases]
        with stream:
            wrong = run_on_device(comm, device, stream.handle, cases, None)
            comm.barrier(stream=stream)
        kinds = [type(plan).__name__ for plan in core_of(comm).devices.plans]
        if kinds.count("MpiDevicePlan") < len(OPERATIONS):
            wrong.append(f"MPI was hardly given anything: {kinds}")
        comm.free()
    return wrong


@pytest.mark.parametrize("memory_flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize(("size", "where"), [(2, ""), (3, "2,1")])
def test_every_operation(
    mpirun: Any, size: int, where: str, memory_flags: bool, seed: int
) -> None:
    env = {"COMMRT_NODES": where, "COMMRT_TIMEOUT_S": "300"} if where else {}
    env["COMMRT_CUDA_AWARE_MPI"] = "flags" if memory_flags else "events"
    found = mpirun(
        size, given_as_they_lie, env=env, seed=seed, memory_flags=memory_flags
    )
    assert found == [[]] * size


def what_runs() -> list[str]:
    """What is chosen with this library as it is, and where it is said to take all."""
    comm = commrt.init()
    told = [str(comm.explain("allreduce", 64, device="cuda"))]
    mpi_calls.KINDS.add("threads")
    with ThreadDevice() as device, DeviceStream(device) as stream:
        x = DeviceArray(device, 4).put([1.0 + comm.rank] * 4)
        comm.allreduce(x)
        other = comm.split(color=0)
        request = other.allreduce(x, nonblocking=True)
        request.wait()
        stream.synchronize()
        assert x.get().tolist() == [6.0] * 4
        told.append(str(other.explain("allreduce", 64, device="cuda")))
        other.free()
        comm.free()
        x.free()
    return told


def test_what_runs_is_what_the_library_says(mpirun: Any) -> None:
    """No MPI library of the tests takes CUDA memory."""
    for before, after in mpirun(2, what_runs):
        assert ": staged/" in before
        assert "not    mpi/native: the MPI library takes no CUDA memory: " in before
        assert ": mpi/native" in after
