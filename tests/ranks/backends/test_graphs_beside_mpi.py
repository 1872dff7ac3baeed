# SPDX-License-Identifier: Apache-2.0
"""Launches of graphs with NCCL's calls, beside an MPI that takes device memory.

The two are never at work on a device at the same time, in launches of graphs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_device_mpi import FakeDeviceMpi
from mpi_device_ranks import mpi_here, on_mpi_threads
from nccl_ranks import nccl_here
from staged_ranks import Rank, forget_ranks
from test_mixed_engines import SMALL, NcclAndMpiRanks, result, values

from commrt import _native
from commrt.comm import core_of
from commrt.devices import DeviceStream
from commrt.errors import OrderingError

SEEDS, FULL_SEEDS = 2, 60
QUEUES = (0, 1, 8)
IN_MPI = ("not_behind_graphs", "not_before_graphs")
IN_NCCL = ("graph_no_wait", "graph_no_record", "graph_seed_alone")
"""Bugs of one engine that the other one must not hide."""


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture(autouse=True)
def mpi() -> Iterator[FakeDeviceMpi]:
    with mpi_here(is_clean=False) as fake:
        yield fake
    assert fake.violations() == []


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


class Launches:
    """Graphs and calls of MPI on one array, between which no stream waits.

    Nobody may do so with two calls of one engine, nor with others.
    """

    def __init__(
        self, comms: list[Any], rank: Rank, mpi: FakeDeviceMpi, holds: bool
    ) -> None:
        self.comms, self.rank, self.mpi, self.holds = comms, rank, mpi, holds
        self.device = rank.device
        self.streams = [DeviceStream(self.device), DeviceStream(self.device)]
        self.x = rank.array(values(rank.rank, 0, 40))
        self.outs = [rank.array(np.zeros(40, "i4")) for _ in range(4)]
        self.held = rank.pin(64)
        self.device.flag_store(self.held, 0)
        self.requests: list[Any] = []
        for backend in ("nccl", "mpi"):  # a first call may wait for the device
            for comm in comms:
                request = comm.allreduce(
                    self.outs[0], backend=backend, nonblocking=True
                )
                request.synchronize()
        rank.stream.synchronize()

    def begin_mpi(self, number: int) -> None:
        """Let MPI begin, and hold it back where that holds back no host.

        On this rank alone: the other one may still wait for an earlier call.
        """
        self.mpi.hold(self.rank.rank, self.holds)
        request = self.comms[number % 2].allreduce(
            self.x,
            out=self.outs[number],
            backend="mpi",
            stream=self.streams[1],
            nonblocking=True,
        )
        request.be_quiet()
        self.requests.append(request)
        self.go_on()

    def go_on(self) -> None:
        """Let who could go on do so."""
        for _ in range(200):
            core_of(self.rank.comm).world.engine.step()
            self.device.flag_load(self.held)

    def capture(self) -> int:
        """Return a graph with calls of two communicators: x is summed up twice."""
        stream = self.streams[0]
        self.device.begin_capture(stream.handle)
        with stream:
            for comm in self.comms:
                comm.allreduce(self.x, backend="nccl")
        return int(self.device.end_capture(stream.handle))

    def run(self) -> None:
        """Launch a graph before and behind each call of MPI."""
        rank, device, launcher = self.rank, self.device, self.streams[0].handle
        self.begin_mpi(0)  # before there is any capture
        graph = self.capture()
        device.graph_launch(graph, launcher)
        self.go_on()
        self.mpi.hold(self.rank.rank, False)
        for number in range(1, len(self.outs)):
            if device.memory_flags:
                device.wait_value32_geq(launcher, self.held, number)
            device.graph_launch(graph, launcher)
            self.begin_mpi(number)
            device.flag_store(self.held, number)
            self.go_on()
            device.graph_launch(graph, launcher)
            self.go_on()
            self.mpi.hold(self.rank.rank, False)
        for request in self.requests:
            request.synchronize()
        for stream in self.streams:
            stream.synchronize()
        found = [rank.fetch(out) for out in self.outs]
        rank.stream.synchronize()
        # x is twice the sum after the first launch; each other one multiplies it by 4.
        for number, value in enumerate(found):
            wanted = 16**number * result("sum", 0, 40, 2)
            assert np.array_equal(value(), wanted), f"call {number}: {value()}"
        while any(core_of(comm).devices.outstanding for comm in self.comms):
            if not core_of(rank.comm).world.engine.step():
                device.pause()
        device.graph_destroy(graph)
        for stream in self.streams:
            stream.destroy()


def kept_apart(
    mpi: FakeDeviceMpi,
    seed: int,
    queues: int,
    *,
    bug: str | None = None,
    nccl_bug: str | None = None,
    memory_flags: bool = True,
    holds: bool | None = None,
) -> bool:
    """Whether graphs and MPI are.

    Without flags a call of MPI returns when MPI is done, so it is not held back.
    """
    is_right = bug is None and nccl_bug is None
    # What a bug has stopped ends no sooner for being waited for.
    with nccl_here(is_clean=False, grace_s=5.0 if is_right else 0.0):
        ranks = NcclAndMpiRanks(
            2,
            seed,
            queues,
            communicators=2,
            staging=SMALL,
            bug=nccl_bug,
            memory_flags=memory_flags,
        )
        for group, device in zip(ranks.groups, ranks.devices, strict=True):
            for comm in group if bug is not None else ():
                core_of(comm).attached["mpi"].runner(device).plant(bug)
        held = memory_flags if holds is None else holds
        run: Callable[[Rank], None] = partial(launched, ranks.groups, mpi, held)
        try:
            ranks.run(run)
            fine = not ranks.world.violations and not mpi.violations()
            if fine:
                ranks.close()
        except (AssertionError, OrderingError):
            if is_right:
                raise
            fine = False
        if not fine:
            forget_ranks()
            mpi.forget()
        return fine


def launched(
    groups: list[list[Any]], mpi: FakeDeviceMpi, holds: bool, rank: Rank
) -> None:
    """Run it on one rank."""
    Launches(groups[rank.rank], rank, mpi, holds).run()


@pytest.mark.parametrize("memory_flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("queues", QUEUES)
def test_launches_and_mpi_are_never_at_work_together(
    queues: int, memory_flags: bool, seeds: range, mpi: FakeDeviceMpi
) -> None:
    for seed in seeds:
        fine = kept_apart(mpi, seed, queues, memory_flags=memory_flags)
        assert fine, f"seed {seed}"


@pytest.mark.parametrize("bug", [*IN_MPI, *IN_NCCL])
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, seeds: range, mpi: FakeDeviceMpi
) -> None:
    where = {"bug" if bug in IN_MPI else "nccl_bug": bug}
    # On a queue of its own each stream shows what orders it.
    for seed in seeds:
        assert not kept_apart(mpi, seed, 0, **where), f"seed {seed}"


@pytest.mark.parametrize("bug", IN_MPI)
def test_a_planted_bug_is_caught_where_streams_have_no_flags(
    bug: str, seeds: range, mpi: FakeDeviceMpi
) -> None:
    for seed in seeds:
        # With the bug the call returns at once, and a launch may come meanwhile.
        holds = bug == "not_before_graphs"
        fine = kept_apart(mpi, seed, 0, bug=bug, memory_flags=False, holds=holds)
        assert not fine, f"seed {seed}"


def test_a_launch_waits_for_mpi_on_real_threads(mpi: FakeDeviceMpi) -> None:
    """And MPI's call for the launch, whichever stream it is in."""

    def main(rank: Rank) -> None:
        comm, device = rank.comm, rank.device
        x, out = rank.array(np.ones(5, "f4")), rank.array(np.zeros(5, "f4"))
        for backend in ("nccl", "mpi"):
            comm.allreduce(out, backend=backend, nonblocking=True).synchronize()
        rank.stream.synchronize()
        device.begin_capture(rank.stream.handle)
        comm.allreduce(x, backend="nccl")
        graph = device.end_capture(rank.stream.handle)
        other = DeviceStream(device)
        device.graph_launch(graph, rank.stream.handle)
        core_of(comm).world.bootstrap.exchange([0, 1], "launched", b"", 20)
        mpi.set("hold", 1)
        request = comm.allreduce(
            x, out=out, backend="mpi", stream=other, nonblocking=True
        )
        device.graph_launch(graph, rank.stream.handle)
        behind = device.event_create()
        device.event_record(behind, rank.stream.handle)
        for number in range(50):
            core_of(comm).world.bootstrap.exchange([0, 1], f"turn {number}", b"", 20)
            assert not device.event_query(behind)
        core_of(comm).world.bootstrap.exchange([0, 1], "looked", b"", 20)
        mpi.set("hold", 0)
        request.synchronize()
        rank.stream.synchronize()
        assert out.get().tolist() == [4.0] * 5
        assert x.get().tolist() == [4.0] * 5
        device.event_destroy(behind)
        device.graph_destroy(graph)
        other.destroy()

    with nccl_here():
        on_mpi_threads(2, main)


def test_the_bugs_are_those_of_the_engines() -> None:
    assert {*IN_MPI} < {*_native.planted_mpi_bugs()}
    assert {*IN_NCCL} < {*_native.planted_nccl_bugs()}
