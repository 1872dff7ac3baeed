# SPDX-License-Identifier: Apache-2.0
"""NCCL, memory of peers, MPI, staged and host operations, in any interleaving."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_device_mpi import FakeDeviceMpi
from ipc_ranks import DEADLINE_S, HALF_NBYTES, ipc_here, on_ipc_threads, prepare
from mpi_device_ranks import join_mpi, mpi_here
from nccl_ranks import NcclSimRanks, nccl_here
from staged_ranks import Rank, attach_anew, forget_ranks, kept_ranks
from test_nccl_order import verdict

from commrt import _native
from commrt.backends.ipc import sharing
from commrt.comm import core_of
from commrt.devices import DeviceStream
from commrt.errors import OrderingError

SEEDS, FULL_SEEDS = 2, 40
CALLS, FULL_CALLS = 50, 400
SMALL = {"slots": 2, "first_nbytes": 1024, "most_nbytes": 1 << 16}
BACKENDS = ("nccl", "ipc", "mpi", "staged", "host", None)
BY_TABLE = ("bxor", "max", "sum")
"""Reductions of which NCCL has all but the first, for integers."""
PLANTED = ("no_ready", "end_early", "end_other_stream", "no_end_wait", "wrong_stream")
"""Bugs of one engine that the others must not hide."""


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture(autouse=True)
def ipc() -> Iterator[None]:
    with ipc_here(is_clean=False):
        yield


@pytest.fixture(autouse=True)
def mpi() -> Iterator[FakeDeviceMpi]:
    with mpi_here(is_clean=False) as fake:
        yield fake
    assert fake.violations() == []


class NcclAndMpiRanks(NcclSimRanks):
    """Ranks that NCCL and MPI serve."""

    def __init__(self, size: int, seed: int, queues: int, **options: Any) -> None:
        super().__init__(size, seed, queues, **options)
        join_mpi(self.groups, self.devices, options.get("first_value", 0), None)

    def close(self) -> None:
        """Let MPI go first."""
        for comm in (each for group in self.groups for each in group):
            core_of(comm).attached["mpi"].close()
            attach_anew(comm, "mpi")
        super().close()


class MixedRanks(NcclAndMpiRanks):
    """Ranks that memory of peers serves, too."""

    def __init__(self, size: int, seed: int, queues: int, **options: Any) -> None:
        super().__init__(size, seed, queues, **options)
        for device in self.devices:
            device.load_kernels(b"")
        first = {"first_value": options.get("first_value", 0)}
        connect_all(self.groups, self.devices, **first)

    def close(self) -> None:
        """Leave each other's memory first."""
        leave_all(self.groups)
        super().close()


def connect_all(
    groups: list[list[Any]], devices: list[Any], first_value: int = 0
) -> None:
    """Let the ranks open each other's memory before the simulation begins."""

    def join(comm: Any) -> None:
        for each in groups[comm.rank]:
            ipc = attach_anew(each, "ipc")
            ipc.half_nbytes, ipc.first_value = HALF_NBYTES, first_value
            prepare(each, devices[comm.rank])

    kept_ranks(len(groups)).each(join)


def leave_all(groups: list[list[Any]]) -> None:
    """Give it back, and see that nothing is left."""
    for comm in (each for group in groups for each in group):
        core_of(comm).attached["ipc"].close()
        attach_anew(comm, "ipc")
    sharing.end_all(DEADLINE_S)
    assert sharing.sweep() == 0


def values(rank: int, number: int, count: int) -> Any:
    return np.arange(count, dtype="i4") * (number + 1) + 7 * rank


def result(op: str, number: int, count: int, size: int) -> Any:
    every = [values(rank, number, count) for rank in range(size)]
    combine = {"sum": np.add, "max": np.maximum, "bxor": np.bitwise_xor}[op]
    return combine.reduce(every)


def wait_on_host(rank: Rank, request: Any) -> None:
    """Wait for a request on host memory, and let a simulation go on meanwhile."""
    while not request.test():
        rank.device.pause()


def mixed(
    groups: list[list[Any]],
    rank: Rank,
    *,
    drawn: int,
    num_calls: int = CALLS,
    backends: tuple[str | None, ...] = BACKENDS,
) -> None:
    """Draw calls that are the same on all ranks, and waits that are this rank's own."""
    same, own = random.Random(drawn), random.Random(f"{drawn} {rank.rank}")
    comms, size = groups[rank.rank], len(groups)
    streams = [rank.stream, DeviceStream(rank.device)]
    host: list[tuple[Any, Any, Any]] = []
    waiting: list[tuple[Any, Any, Callable[..., Any], Any]] = []
    fetched: list[tuple[Callable[[], Any], Any]] = []

    def settle(at: int) -> None:
        request, x, _, wanted = waiting.pop(at)
        request.wait(stream=rank.stream)
        fetched.append((rank.fetch(x), wanted))

    for number in range(num_calls):
        comm = comms[same.randrange(len(comms))]
        backend, op = same.choice(backends), same.choice(BY_TABLE)
        count, nonblocking = same.choice((1, 5, 40)), same.random() < 0.7
        stream = streams[same.randrange(2)]
        if number == 0:  # whatever is drawn, some call is in its caller's stream
            backend, nonblocking = "nccl", False
        if backend == "nccl" and op == "bxor":
            op = "sum"
        wanted = result(op, number, count, size)
        if backend == "host":
            given = values(rank.rank, number, count)
            host.append((comm.allreduce(given, op=op, nonblocking=True), given, wanted))
            continue
        x = rank.array(values(rank.rank, number, count))
        if stream is not rank.stream:
            event = rank.device.event_create()
            rank.device.event_record(event, rank.stream.handle)
            rank.device.stream_wait_event(stream.handle, event)
        if nonblocking:
            request = comm.allreduce(
                x, op=op, backend=backend, stream=stream, nonblocking=True
            )
            request.be_quiet()
            waiting.append((request, x, rank.fetch, wanted))
        else:
            comm.allreduce(x, op=op, backend=backend, stream=stream)
            fetched.append((rank.fetch_in(x, stream), wanted))
        while waiting and own.random() < 0.3:
            settle(own.randrange(len(waiting)))
        if host and own.random() < 0.2:
            wait_on_host(rank, host[own.randrange(len(host))][0])
    while waiting:
        settle(own.randrange(len(waiting)))
    for request, found, wanted in host:
        wait_on_host(rank, request)
        assert np.array_equal(found, wanted)
    for each in streams:
        each.synchronize()
    for value, wanted in fetched:
        assert np.array_equal(value(), wanted), f"rank {rank.rank}"
    rank.finish()
    while any(core_of(comm).devices.outstanding for comm in comms):
        if not core_of(rank.comm).world.engine.step():
            rank.device.pause()
    streams[1].destroy()


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
@pytest.mark.parametrize("size", [2, 3])
def test_no_interleaving_waits_for_itself(
    size: int, queues: int, seed: int, full: bool
) -> None:
    """Three communicators, two streams, five engines; one hardware queue, too."""
    for each in range(seed, seed + (FULL_SEEDS if full else SEEDS)):
        with nccl_here() as nccl:
            ranks = MixedRanks(size, each, queues, communicators=3, staging=SMALL)
            calls = FULL_CALLS if full else CALLS
            ranks.run(partial(mixed, ranks.groups, drawn=each, num_calls=calls))
            ranks.close()
            assert nccl.counter("kernels") > 0


def test_hundreds_are_outstanding(seed: int) -> None:
    with nccl_here():
        ranks = MixedRanks(2, seed, 1, communicators=3, staging=SMALL)

        def main(rank: Rank) -> None:
            comms = ranks.groups[rank.rank]
            xs = [rank.array(values(rank.rank, i, 4)) for i in range(300)]
            requests = []
            for number, x in enumerate(xs):
                backend = ("nccl", "staged", "ipc", "mpi")[number % 4]
                comm = comms[number % len(comms)]
                requests.append(comm.allreduce(x, backend=backend, nonblocking=True))
            assert len(requests) == 300
            for request in reversed(requests):
                request.wait()
            found = [rank.fetch(x) for x in xs]
            for request in requests:
                request.synchronize()
            rank.stream.synchronize()
            for number, value in enumerate(found):
                assert np.array_equal(value(), result("sum", number, 4, 2))

        ranks.run(main)
        ranks.close()


PLANTED_IN_MPI = ("not_behind_nccl", "not_before_nccl")
PLANTED_IN_IPC = ("no_ready", "end_early", "no_await", "values_again", "user_stream")


@pytest.mark.parametrize("bug", PLANTED_IN_IPC)
def test_a_bug_over_memory_of_peers_is_caught_between_other_engines(
    bug: str, seed: int, full: bool
) -> None:
    for each in range(seed, seed + (FULL_SEEDS if full else 1)):
        with nccl_here(is_clean=False, grace_s=0.0):
            ranks = MixedRanks(2, each, 8, communicators=2, staging=SMALL)
            for group, device in zip(ranks.groups, ranks.devices, strict=True):
                for comm in group:
                    core_of(comm).attached["ipc"].runner(device).plant(bug)
            try:
                ranks.run(partial(mixed, ranks.groups, drawn=each))
                found = bool(ranks.world.violations)
            except (AssertionError, OrderingError):
                found = True
            forget_ranks()
        assert found, f"seed {each}"


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught_between_other_engines(
    bug: str, queues: int, seed: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_CUDA_AWARE_MPI", "off")  # the bugs' ranks have none
    for each in range(seed, seed + (FULL_SEEDS if full else 1)):
        run = partial(mixed, drawn=each, backends=("nccl", "staged", "host", None))
        assert verdict(each, queues, bug, run), f"seed {each}"


def test_flags_count_on_beyond_their_end(seed: int) -> None:
    with nccl_here():
        start = {"first_value": 2**32 - 9}
        ranks = MixedRanks(
            2, seed, 2, communicators=2, staging={**SMALL, **start}, **start
        )
        ranks.run(partial(mixed, ranks.groups, drawn=seed))
        ranks.close()


def test_mixed_calls_of_real_threads(seed: int) -> None:
    """The same over devices of threads, whose progress is the engine's thread."""

    def main(rank: Rank) -> None:
        comms = [rank.comm, rank.comm.dup(), rank.comm.dup()]
        groups = [comms] * rank.comm.size
        mixed(groups, rank, drawn=seed, num_calls=60)
        for comm in comms[1:]:
            comm.free()

    with nccl_here() as nccl:
        on_ipc_threads(3, main, seed=seed, max_delay_us=20)
        assert nccl.counter("kernels") > 0


def beside_nccl(groups: list[list[Any]], rank: Rank, mpi: FakeDeviceMpi) -> None:
    """NCCL's and MPI's calls on the same array, between which nobody waits.

    Nobody may do so with two calls of one engine, nor with others. These two are never
    at work at the same time, so the later one comes after the earlier one. What begins
    is held back until the other one could have gone on.
    """
    comms, device = groups[rank.rank], rank.device
    streams = [DeviceStream(device), DeviceStream(device)]
    x = rank.array(values(rank.rank, 0, 40))
    outs = [rank.array(np.zeros(40, "i4")) for _ in range(4)]
    held = rank.pin(64)
    device.flag_store(held, 0)
    for backend in ("nccl", "mpi"):  # a first call may wait for the device
        for comm in comms:
            comm.allreduce(outs[0], backend=backend, nonblocking=True).synchronize()
    rank.stream.synchronize()
    requests = []

    def begin(backend: str, out: Any, stream: DeviceStream, comm: Any) -> None:
        how = {"backend": backend, "stream": stream, "nonblocking": True}
        requests.append(comm.allreduce(x, out=out, **how))
        requests[-1].be_quiet()

    def go_on() -> None:
        for _ in range(200):
            core_of(rank.comm).world.engine.step()
            device.flag_load(held)

    for number, out in enumerate(outs):
        if device.memory_flags:
            device.wait_value32_geq(streams[0].handle, held, number + 1)
        begin("nccl", x, streams[0], comms[number % 2])
        # Without flags NCCL's call returns when MPI is done.
        mpi.hold(rank.rank, device.memory_flags)
        begin("mpi", out, streams[1], comms[(number + 1) % 2])
        go_on()
        device.flag_store(held, number + 1)
        go_on()
        begin("nccl", x, streams[0], comms[number % 2])
        go_on()
        mpi.hold(rank.rank, False)
    for request in requests:
        request.synchronize()
    found = [rank.fetch(out) for out in outs]
    rank.stream.synchronize()
    for number, value in enumerate(found):  # NCCL doubles it twice in each turn
        wanted = 2 * 4**number * result("sum", 0, 40, 2)
        assert np.array_equal(value(), wanted)
    rank.finish()
    while any(core_of(comm).devices.outstanding for comm in comms):
        if not core_of(rank.comm).world.engine.step():
            device.pause()
    for each in streams:
        each.destroy()


def kept_apart(
    mpi: FakeDeviceMpi, seed: int, queues: int, bug: str | None, **options: Any
) -> bool:
    """Whether NCCL and MPI are."""
    with nccl_here(is_clean=False, grace_s=5.0 if bug is None else 0.0):
        ranks = NcclAndMpiRanks(
            2, seed, queues, communicators=2, staging=SMALL, **options
        )
        for group, device in zip(ranks.groups, ranks.devices, strict=True):
            for comm in group if bug is not None else ():
                core_of(comm).attached["mpi"].runner(device).plant(bug)
        try:
            ranks.run(partial(beside_nccl, ranks.groups, mpi=mpi))
            fine = not ranks.world.violations and not mpi.violations()
            if fine:
                ranks.close()
        except (AssertionError, OrderingError):
            if bug is None:
                raise
            fine = False
        if not fine:
            forget_ranks()
            mpi.forget()
        return fine


@pytest.mark.parametrize("memory_flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("queues", [0, 1, 8])
def test_nccl_and_mpi_are_never_at_work_together(
    queues: int, memory_flags: bool, seed: int, mpi: FakeDeviceMpi
) -> None:
    for each in range(seed, seed + 3):
        assert kept_apart(mpi, each, queues, None, memory_flags=memory_flags), (
            f"seed {each}"
        )


@pytest.mark.parametrize("bug", PLANTED_IN_MPI)
def test_engines_that_are_not_kept_apart_are_caught(
    bug: str, seed: int, mpi: FakeDeviceMpi
) -> None:
    # On a queue of its own each stream shows what orders it.
    for each in range(seed, seed + 3):
        assert not kept_apart(mpi, each, 0, bug), f"seed {each}"


def test_the_list_of_bugs_is_that_of_the_engine() -> None:
    assert {*PLANTED_IN_MPI} < {*_native.planted_mpi_bugs()}
    assert {*PLANTED} < {*_native.planted_nccl_bugs()}
    assert {*PLANTED_IN_IPC} < {*_native.planted_peer_bugs()}
