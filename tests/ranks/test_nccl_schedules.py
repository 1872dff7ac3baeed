# SPDX-License-Identifier: Apache-2.0
"""Schedules on NCCL: rounds in a stream of a device, against numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from cases import Attempt, Case, legal_pairs
from fake_nccl import FakeNccl
from program_cases import draw, spec_of
from staged_cases import DeviceAttempt

from commrt.backends.nccl_schedules import NcclSchedules
from commrt.backends.stream_programs import nccl_program
from commrt.devices import SimWorld, ThreadDevice
from commrt.errors import CaptureError, DeviceFailedError, TimeoutError_
from commrt.nccl import NcclComm
from commrt.operations import OPERATIONS

SIZES = (1, 2, 3, 4, 5, 8)
COLLS = [spec.name for spec in OPERATIONS]
DRAWN = 5


@contextmanager
def devices(size: int, seed: int) -> Iterator[tuple[FakeNccl, list[ThreadDevice]]]:
    """A pretended NCCL whose kernels run in the streams of devices of threads."""
    nccl = FakeNccl()
    made = [ThreadDevice(seed=seed + rank, max_delay_us=30) for rank in range(size)]
    nccl.run_on(made)
    try:
        yield nccl, made
    finally:
        for device in made:
            device.close()


def _run(
    comm: NcclComm, device: Any, cases: list[Case], streams: list[int]
) -> list[str]:
    schedules = NcclSchedules(comm, device)
    wrong = []
    nodes = (0,) * comm.size
    for number, case in enumerate(cases):
        stream = streams[number % len(streams)]
        attempt = DeviceAttempt(case, comm.rank, device, stream)
        spec = spec_of(case, attempt)
        plan = nccl_program(spec, comm.rank, comm.size, nodes)
        x = attempt.x.ctypes.data
        out = x if attempt.out is None else attempt.out.ctypes.data
        schedules.run(plan, x=x, out=out, stream=stream, what=case.coll)
        device.stream_synchronize(stream)
        attempt.result = attempt.out
        if (verdict := attempt.verdict()) is not None:
            wrong.append(f"rank {comm.rank}: {verdict} ({case})")
        attempt.free()
    schedules.close()
    return wrong


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coll", COLLS)
def test_sample_agrees_with_numpy(coll: str, size: int, seed: int) -> None:
    rng = random.Random(f"{coll} {size} {seed}")
    cases = [draw(coll, size, rng) for _ in range(DRAWN)]
    with devices(size, seed) as (nccl, made), nccl.ranks(size) as comms:

        def main(comm: NcclComm) -> list[str]:
            device = made[comm.rank]
            streams = [device.stream_create() for _ in range(2)]
            return _run(comm, device, cases, streams)

        wrong = nccl.on_each(comms, main)
        assert [line for lines in wrong for line in lines] == []
        nccl.check()


@pytest.mark.parametrize(("dtype", "op"), legal_pairs())
def test_every_type_and_reduction(dtype: str, op: str) -> None:
    cases = [
        Case("allreduce", 3, "direct", {}, dtype, op, count=37),
        Case("reduce_scatter", 3, "ring", {}, dtype, op, count=5),
        Case("allreduce", 3, "recursive_doubling", {}, dtype, op, 0, 9, in_place=True),
    ]
    with devices(3, 1) as (nccl, made), nccl.ranks(3) as comms:

        def main(comm: NcclComm) -> list[str]:
            return _run(comm, made[comm.rank], cases, [0])

        assert [line for lines in nccl.on_each(comms, main) for line in lines] == []
        nccl.check()


class Prepared:
    """One rank's call of a case, ready to be given to its device."""

    def __init__(self, comm: NcclComm, device: Any, case: Case) -> None:
        self.schedules = NcclSchedules(comm, device)
        self.attempt = DeviceAttempt(case, comm.rank, device, 0)
        spec = spec_of(case, self.attempt)
        self.plan = nccl_program(spec, comm.rank, comm.size, (0,) * comm.size)

    def give(self, timeout_s: float | None = None) -> None:
        out = self.attempt.out
        assert out is not None
        self.schedules.run(
            self.plan,
            x=self.attempt.x.ctypes.data,
            out=out.ctypes.data,
            stream=0,
            what="allreduce",
            timeout_s=timeout_s,
        )


RING = Case("allreduce", 2, "ring", count=64)


def test_work_comes_between_groups_that_are_in_progress(seed: int) -> None:
    """NCCL says later that a group is in the stream; kernels wait for that."""
    with devices(2, seed) as (nccl, made):
        with nccl.ranks(2) as comms:
            nccl.set("in_progress", 3)
            wrong = nccl.on_each(
                comms, lambda comm: _run(comm, made[comm.rank], [RING] * 3, [0])
            )
            nccl.set("in_progress", 0)
        assert wrong == [[], []]
        nccl.check()


def test_a_program_has_one_group_per_round(seed: int) -> None:
    with devices(2, seed) as (nccl, made), nccl.ranks(2) as comms:
        before = comms[0]._native.num_groups

        def main(comm: NcclComm) -> int:
            call = Prepared(comm, made[comm.rank], RING)
            call.give()
            made[comm.rank].stream_synchronize(0)
            return call.plan.num_groups

        assert nccl.on_each(comms, main) == [2, 2]
        assert comms[0]._native.num_groups == before + 2


def test_a_deadline_between_rounds_loses_the_communicator(seed: int) -> None:
    with devices(2, seed) as (nccl, made), nccl.ranks(2) as comms:
        nccl.set("hang_group", 1)
        errors = nccl.errors(
            comms, lambda comm: Prepared(comm, made[comm.rank], RING).give(0.2)
        )
        hung = [error for error in errors if error is not None]
        assert hung
        for error in hung:
            assert isinstance(error, TimeoutError_)
            assert "half done, so the communicator is lost" in str(error)
        nccl.set("hang_group", 0)
        nccl.release()
        nccl.on_each(comms, lambda comm: comm.abort(1.0))


def test_a_device_that_fails_between_rounds_loses_the_communicator(seed: int) -> None:
    with devices(2, seed) as (nccl, made), nccl.ranks(2) as comms:
        calls = [Prepared(comm, made[comm.rank], RING) for comm in comms]
        made[0].fail_after(1)
        made[0].launch_copy(calls[0].attempt.allocated[0], 0, 0, 0)
        with pytest.raises(DeviceFailedError):
            made[0].stream_synchronize(0)
        with pytest.raises(DeviceFailedError):
            calls[0].give()
        nccl.release()
        nccl.on_each(comms, lambda comm: comm.abort(1.0))


def test_scratch_memory_is_refused_in_a_capture(seed: int) -> None:
    """And only that: what needs none is given to the stream, and captured."""
    nccl = FakeNccl()
    with SimWorld(seed=seed) as world, nccl.ranks(1) as (comm,):
        device = world.device("gpu")
        schedules = NcclSchedules(comm, device)
        stream = device.stream_create()
        x, out = device.alloc(256), device.alloc(256)
        device.begin_capture(stream)
        for op, captured in (("sum", True), ("avg", True), ("premul_sum", False)):
            case = Case("allreduce", 1, "direct", {}, "float32", op, count=64)
            spec = spec_of(case, Attempt(case, 0))
            plan = nccl_program(spec, 0, 1, (0,))
            assert (plan.scratch_nbytes == 0) == captured
            give = partial(schedules.run, plan, x=x, out=out, stream=stream)
            if captured:
                give(what="allreduce")
                continue
            with pytest.raises(CaptureError, match="scratch memory"):
                give(what="allreduce")
        assert device.end_capture(stream) == 2
        schedules.close()
