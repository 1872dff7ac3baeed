# SPDX-License-Identifier: Apache-2.0
"""Schedules over exchange memory of processes: order, results, planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cases import Case
from program_cases import draw, spec_of
from staged_cases import DeviceAttempt

from commrt import _native
from commrt.backends.peer_memory import PeerMemory
from commrt.backends.peer_programs import peer_program
from commrt.backends.stream_programs import StreamPlan
from commrt.bootstrap import ThreadWorld
from commrt.devices import SimWorld, ThreadDevice
from commrt.errors import (
    BackendError,
    CaptureError,
    ClosedError,
    DeviceFailedError,
    OrderingError,
)
from commrt.operations import OPERATIONS

HALF = 1 << 17
COLLS = [spec.name for spec in OPERATIONS if spec.name != "alltoallv"]
PLANTED = [name for name in _native.planted_in_exchange() if name != "none"]


def connected(devices: list[Any], half_nbytes: int = HALF) -> list[PeerMemory]:
    """Return every rank's exchange memory, from one thread."""
    size = len(devices)
    made = [
        PeerMemory(device, rank, size, half_nbytes)
        for rank, device in enumerate(devices)
    ]
    for one in made:
        one.open([other.handle for other in made])
    return made


def close_all(made: list[PeerMemory]) -> None:
    """Close from one thread: nobody frees what another one has open."""
    for one in made:
        one.native._close()
    for one in made:
        one._forget_peers()
    for one in made:
        one._free()


def plan_of(case: Case, attempt: DeviceAttempt, half_nbytes: int = HALF) -> StreamPlan:
    """Return a rank's plan of a case."""
    spec = spec_of(case, attempt)
    return peer_program(spec, attempt.rank, case.size, (0,) * case.size, half_nbytes)


# -- on devices of threads: results


@contextmanager
def on_threads(size: int, seed: int) -> Iterator[list[PeerMemory]]:
    devices = [ThreadDevice(seed=seed + r, max_delay_us=30) for r in range(size)]
    try:
        made = connected(devices)
        yield made
        close_all(made)
    finally:
        for device in devices:
            device.close()


def _run(memory: PeerMemory, cases: list[Case], size: int) -> list[str]:
    device, wrong = memory.device, []
    stream = device.stream_create()
    for case in cases:
        attempt = DeviceAttempt(case, memory.rank, device, stream)
        plan = plan_of(case, attempt)
        x = attempt.x.ctypes.data
        out = x if attempt.out is None else attempt.out.ctypes.data
        memory.run(plan, x=x, out=out, stream=stream)
        device.stream_synchronize(stream)
        attempt.result = attempt.out
        if (verdict := attempt.verdict()) is not None:
            wrong.append(f"rank {memory.rank}: {verdict} ({case})")
        attempt.free()
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("coll", COLLS)
def test_sample_agrees_with_numpy(
    coll: str, size: int, seed: int, run_threads: Callable[..., Any]
) -> None:
    rng = random.Random(f"{coll} {size} {seed}")
    cases: list[Case] = []
    while len(cases) < 4:
        case = draw(coll, size, rng)
        if case.count * size <= 2000:  # what an alltoall publishes fits
            cases.append(case)
    with on_threads(size, seed) as made:
        wrong = run_threads(size, lambda rank: _run(made[rank], cases, size))
    assert [line for lines in wrong for line in lines] == []


# -- simulated: order


class SimRank:
    """A caller on a simulated device, and what it finds in its outputs."""

    def __init__(self, memory: PeerMemory, cases: list[Case]) -> None:
        self.memory, self.device, self.cases = memory, memory.device, cases
        self.seen: list[np.ndarray[Any, Any]] = []
        # Allocated before anything runs: to allocate may wait for the device.
        self.places: list[tuple[Any, StreamPlan, int, int, int, int]] = []
        for case in cases:
            attempt = _Pinned(case, memory.rank, self.device)
            plan = plan_of(case, attempt, memory.half_nbytes)
            nbytes = max(1, attempt.x.nbytes)
            out_nbytes = nbytes if attempt.out is None else max(1, attempt.out.nbytes)
            x = self.device.alloc(nbytes)
            out = x if attempt.out is attempt.x else self.device.alloc(out_nbytes)
            source, target = (self.device.pinned_alloc(n) for n in (nbytes, out_nbytes))
            self.device.write(source, attempt.x.tobytes())
            memory._scratch_for(plan.scratch_nbytes)
            self.places.append((attempt, plan, x, out, source, target))
        self.stream = self.device.stream_create()

    def run(self) -> None:
        """Fill, run and fetch, case after case, without waiting for any."""
        for attempt, plan, x, out, source, target in self.places:
            nbytes = attempt.x.nbytes
            self.device.memcpy_async(x, source, nbytes, self.stream)
            self.memory.run(plan, x=x, out=out, stream=self.stream)
            if attempt.want is not None:
                self.device.memcpy_async(target, out, attempt.out.nbytes, self.stream)
        self.device.stream_synchronize(self.stream)

    def wrong(self) -> list[str]:
        """Say what is wrong, once all have run."""
        found = []
        for attempt, _, _, _, _, target in self.places:
            if attempt.want is None or attempt.out is None:
                continue
            raw = self.device.read(target, attempt.out.nbytes)
            attempt.out[:] = np.frombuffer(raw, attempt.out.dtype)
            attempt.result = attempt.out
            if (verdict := attempt.verdict()) is not None:
                found.append(f"{verdict} ({attempt.case})")
        return found


class _Pinned(DeviceAttempt):
    """An attempt whose own arrays lie on the host; the device gets copies."""

    def __init__(self, case: Case, rank: int, device: Any) -> None:
        super().__init__(case, rank, device, 0)

    def _memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        return np.empty(nbytes, np.uint8)


def simulate(
    cases: list[Case],
    size: int,
    seed: int,
    queues: int = 8,
    planted: str = "none",
    half_nbytes: int = 512,
    first_value: int = 0,
) -> list[str]:
    """Run cases, one after the other without waiting, on simulated processes."""
    with SimWorld(seed=seed, queues=queues) as world:
        devices = [world.device(f"rank{rank}") for rank in range(size)]
        for device in devices:
            device.load_kernels(b"")
        made = connected(devices, half_nbytes)
        for one in made:
            one.native.planted = planted
        ranks = [SimRank(one, cases) for one in made]
        if first_value:
            for one in made:
                _set_flags(one, first_value)
                one.native._count_from(first_value)
        world.run({f"rank{r}": rank.run for r, rank in enumerate(ranks)})
        for device in devices:
            for stream in [rank.stream for rank in ranks if rank.device is device]:
                device.stream_synchronize(stream)
        world.check()
        found = [line for rank in ranks for line in rank.wrong()]
        close_all(made)
        world.check()
    return found


def _set_flags(memory: PeerMemory, value: int) -> None:
    """Begin all flags anew, by a plain write."""
    device, stream = memory.device, memory.device.stream_create()
    flags = np.full(2 * memory.size * 16, value, np.uint32)
    source = device.pinned_alloc(flags.nbytes)
    device.write(source, flags.tobytes())
    device.memcpy_async(memory.memory, source, flags.nbytes, stream)
    device.stream_synchronize(stream)
    device.pinned_free(source)
    device.stream_destroy(stream)


def ordered_cases(size: int) -> list[Case]:
    """Return calls in one and two shots, long and short ones, and others between."""
    return [
        Case("allreduce", size, "direct", count=40),
        Case("allreduce", size, "ring", count=33, in_place=True),
        Case("allgather", size, "ring", count=9),
        Case("allreduce", size, "direct", {"chunk": 64}, count=100),
        Case("bcast", size, "binomial", count=50, root=size - 1),
        Case("reduce_scatter", size, "direct", count=7),
        Case("allreduce", size, "direct", count=40),
    ]


@pytest.mark.parametrize("queues", [1, 2, 8, 0])
@pytest.mark.parametrize("size", [2, 3])
def test_everything_is_ordered(size: int, queues: int, seed: int) -> None:
    for each in range(3):
        assert simulate(ordered_cases(size), size, seed + each, queues) == []


@pytest.mark.parametrize("coll", COLLS)
def test_every_operation_is_ordered(coll: str, seed: int) -> None:
    rng = random.Random(f"{coll} {seed}")
    size = rng.choice([2, 3, 4])
    cases: list[Case] = []
    while len(cases) < 3:
        case = draw(coll, size, rng)
        if case.count <= 64:
            cases.append(case)
    assert simulate(cases, size, seed, half_nbytes=1 << 13) == []


def test_flags_count_on_beyond_their_largest_value(seed: int) -> None:
    assert simulate(ordered_cases(2), 2, seed, first_value=2**32 - 3) == []


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_bug_is_found_in_every_run(planted: str, seed: int) -> None:
    for each in range(3):
        with pytest.raises(OrderingError):
            simulate(ordered_cases(2), 2, seed + each, planted=planted)


# -- what is refused, and ends


def test_a_capture_is_refused_and_goes_on(seed: int) -> None:
    with SimWorld(seed=seed) as world:
        devices = [world.device(f"rank{rank}") for rank in range(2)]
        made = connected(devices)
        case = Case("allreduce", 2, "direct")
        device = devices[0]
        attempt = _Pinned(case, 0, device)
        plan = plan_of(case, attempt)
        x, stream = device.alloc(attempt.x.nbytes), device.stream_create()
        device.begin_capture(stream)
        with pytest.raises(CaptureError, match="cannot be captured"):
            made[0].run(plan, x=x, out=x, stream=stream)
        device.end_capture(stream)
        close_all(made)


def test_a_device_without_flags_is_refused() -> None:
    with (
        ThreadDevice(memory_flags=False) as device,
        pytest.raises(BackendError, match="staged"),
    ):
        PeerMemory(device, 0, 2)


def test_giving_up_lets_streams_go() -> None:
    """The peer never comes; its flags are written in its place."""
    with SimWorld(seed=1, queues=0, check_order=False) as world:
        devices = [world.device(f"rank{rank}") for rank in range(2)]
        for device in devices:
            device.load_kernels(b"")
        made = connected(devices)
        case = Case("allreduce", 2, "direct")
        attempt = _Pinned(case, 0, devices[0])
        plan = plan_of(case, attempt)
        x = devices[0].alloc(attempt.x.nbytes)
        stream = devices[0].stream_create()
        made[0].run(plan, x=x, out=x, stream=stream)
        made[0].give_up()
        devices[0].stream_synchronize(stream)
        with pytest.raises(DeviceFailedError, match="given up"):
            made[0].run(plan, x=x, out=x, stream=stream)
        close_all(made)
        with pytest.raises(ClosedError):
            made[0].run(plan, x=x, out=x, stream=stream)


def test_ranks_connect_and_close_together(run_threads: Callable[..., Any]) -> None:
    world = ThreadWorld(3)
    devices = [ThreadDevice(seed=rank) for rank in range(3)]

    def main(rank: int) -> list[str]:
        boot = world.bootstrap(rank)
        with PeerMemory.connect(boot, range(3), devices[rank], HALF) as memory:
            return _run(memory, [Case("allreduce", 3, "direct")], 3)

    try:
        assert run_threads(3, main) == [[], [], []]
    finally:
        for device in devices:
            device.close()


def test_all_ranks_learn_that_one_cannot_share(run_threads: Callable[..., Any]) -> None:
    world = ThreadWorld(2)
    devices = [ThreadDevice(seed=1), ThreadDevice(seed=2, memory_flags=False)]

    def main(rank: int) -> str:
        with pytest.raises(BackendError) as caught:
            PeerMemory.connect(world.bootstrap(rank), range(2), devices[rank], HALF)
        return str(caught.value)

    try:
        first, second = run_threads(2, main)
    finally:
        for device in devices:
            device.close()
    assert "rank 1: ipc: streams of" in first
    assert "do not write flags" in second


def test_an_event_of_the_end_is_lent(seed: int) -> None:
    """Other streams wait for it, and it is used again."""
    with on_threads(1, seed) as made:
        memory, device = made[0], made[0].device
        case = Case("allreduce", 1, "direct")
        attempt = DeviceAttempt(case, 0, device, 0)
        stream = device.stream_create()
        plan = plan_of(case, attempt)
        out = attempt.out
        assert out is not None
        addresses = {"x": attempt.x.ctypes.data, "out": out.ctypes.data}
        event = memory.start(plan, **addresses, stream=stream)
        device.stream_wait_event(stream, event)
        device.stream_synchronize(stream)
        assert (out == attempt.x).all()
        memory.end(event)
        assert memory.start(plan, **addresses, stream=stream) == event
        memory.end(event)
        device.stream_synchronize(stream)
        attempt.free()
