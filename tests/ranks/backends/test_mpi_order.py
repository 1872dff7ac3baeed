# SPDX-License-Identifier: Apache-2.0
"""The order of MPI's calls on device memory, on simulated devices; planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import Attempt, Case
from mpi_device_ranks import MpiSimRanks, mpi_here, verdict
from staged_ranks import Rank
from test_ipc_order import Part

from commrt import _native
from commrt.comm import core_of
from commrt.devices import DeviceStream
from commrt.errors import CommError, OrderingError
from commrt.vocabulary.operations import operation

SEEDS, FULL_SEEDS = 2, 60
GOOD_SEEDS, FULL_GOOD_SEEDS = 3, 150
QUEUES = (0, 1, 2, 8)
OF_FAILURES = ("flags_kept", "not_started")
"""Bugs of operations that fail."""
OF_NCCL = (
    *("not_behind_nccl", "not_before_nccl"),
    *("not_behind_graphs", "not_before_graphs"),
)
"""Bugs beside NCCL: test_mixed_engines.py, test_graphs_beside_mpi.py."""
BUGS = [
    bug for bug in _native.planted_mpi_bugs() if bug not in (*OF_FAILURES, *OF_NCCL)
]
COMMUNICATORS = {"communicators": 2}


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


def given(rank: int, number: int, count: int) -> Any:
    """Numbers whose sums are exact."""
    return np.arange(count, dtype="f4") + 10 * number + 100 * rank


def exchanged(rank: int, number: int, count: int, size: int) -> Any:
    """What an alltoall of all ranks' numbers brings."""
    blocks = [np.split(given(each, number, count), size) for each in range(size)]
    return np.concatenate([each[rank] for each in blocks])


def finish(groups: list[list[Any]], rank: Rank) -> None:
    """Make progress until the host has seen the end of all calls."""
    while any(core_of(comm).devices.outstanding for comm in groups[rank.rank]):
        if not core_of(rank.comm).world.engine.step():
            rank.device.pause()


def calls(groups: list[list[Any]], rank: Rank) -> None:
    """In place and beside it, blocking or not, on two communicators, in two streams.

    Arrays are filled and fetched in the same streams, without the host waiting.
    """
    comms, size = groups[rank.rank], len(groups)
    other = DeviceStream(rank.device)
    checks: list[tuple[Callable[[], Any], Any]] = []
    requests: list[Any] = []
    for number in range(8):
        comm, count = comms[number % len(comms)], 4 * size * (1 + number % 3)
        x = rank.array(given(rank.rank, number, count))
        wanted = sum(given(each, number, count) for each in range(size))
        nonblocking = number % 2 == 1
        call = comm.allreduce
        if number % 4 >= 2:  # two at once that want their input elsewhere
            call = comms[0].alltoall
            wanted = exchanged(rank.rank, number, count, size)
            nonblocking = True
        request = call(x, nonblocking=nonblocking)
        if nonblocking:
            requests.append(request)
            request.be_quiet()
            if number % 4 != 2:
                for each in requests[-2:]:
                    each.wait()
        if number % 4 != 2:
            checks.append((rank.fetch(x), wanted))
    # A root's output beside its input.
    x, out = rank.array(given(rank.rank, 8, 9)), rank.array(np.zeros(9, "f4"))
    comms[0].bcast(x, out=out, root=size - 1)
    checks.append((rank.fetch(out), given(size - 1, 8, 9)))
    # NCCL's form of in place.
    whole = rank.array(given(rank.rank, 9, 5 * size))
    own = Part(whole, 5 * rank.rank, 5)
    comms[0].reduce_scatter(whole, out=own)
    wanted = sum(given(each, 9, 5 * size) for each in range(size))
    checks.append((rank.fetch(own), wanted[5 * rank.rank :][:5]))
    # In another stream, by an array that the first one fills.
    x = rank.array(given(rank.rank, 10, 3))
    event = rank.device.event_create()
    rank.device.event_record(event, rank.stream.handle)
    rank.device.stream_wait_event(other.handle, event)
    request = comms[-1].allreduce(x, nonblocking=True, stream=other)
    requests.append(request)
    request.be_quiet()
    request.wait(stream=rank.stream)
    checks.append((rank.fetch(x), sum(given(each, 10, 3) for each in range(size))))
    for request in requests:
        request.synchronize()
    # The host has seen the end: it may give the array to any stream.
    x = rank.array(given(rank.rank, 11, 64))
    comms[0].allreduce(x, nonblocking=True).synchronize()
    wanted = sum(given(each, 11, 64) for each in range(size))
    checks.append((rank.fetch_in(x, other), wanted))
    for stream in (rank.stream, other):
        stream.synchronize()
    for value, wanted in checks:
        assert np.array_equal(value(), wanted), f"rank {rank.rank}"
    kinds = {type(each) for comm in comms for each in core_of(comm).devices.plans}
    assert kinds == {_native.MpiDevicePlan}
    finish(groups, rank)
    other.destroy()


@pytest.mark.parametrize("memory_flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_order_is_right_whatever_happens_when(
    size: int, queues: int, memory_flags: bool, seed: int, full: bool
) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS))
    options = {**COMMUNICATORS, "memory_flags": memory_flags}
    found = {
        each: verdict(calls, size, each, queues, None, **options) for each in seeds
    }
    assert {each: what for each, what in found.items() if what} == {}


@pytest.mark.parametrize("queues", [1, 2, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, seeds: range
) -> None:
    found = {
        each: verdict(calls, 2, each, queues, bug, **COMMUNICATORS) for each in seeds
    }
    assert [each for each, what in found.items() if not what] == []


def test_flags_count_on_beyond_their_largest_value(seeds: range) -> None:
    start = {**COMMUNICATORS, "first_value": 2**32 - 4}
    for each in seeds:
        assert verdict(calls, 2, each, 2, None, **start) == ""


def test_calls_leave_nothing_behind(full: bool, seed: int) -> None:
    def main(groups: list[list[Any]], rank: Rank) -> None:
        x = rank.array(np.zeros(8, "f4"))
        work = core_of(rank.comm).attached["mpi"].runner(rank.device)
        for _ in range(5_000 if full else 200):
            request = rank.comm.alltoall(x, nonblocking=True)
            request.wait()
            request.synchronize()
        assert work.outstanding == 0
        assert work.num_events <= 3

    assert verdict(main, 2, seed, 8, None) == ""


# --- operations that fail ---


def outcome(request: Any) -> str:
    """What a request says in the end, by the name of its error."""
    try:
        request.synchronize()
    except CommError as error:
        return type(error).__name__
    return ""


def failing(rank: Rank) -> list[str]:
    """Exchange in place, until rank 1 gives up instead; all that was given still ends.

    Arrays that a stream was told to wait for are filled again in it.
    """
    xs = [rank.array(given(rank.rank, i, 40)) for i in range(5)]
    requests = []
    said = ""
    for number, x in enumerate(xs):
        if number == 3 and rank.rank == 1:
            core_of(rank.comm).give_up("it was told to")
        try:
            requests.append(rank.comm.alltoall(x, nonblocking=True))
            requests[-1].wait()
            rank.fill(x, number)
        except CommError as error:
            said = type(error).__name__
            break
    return [*map(outcome, requests), said]


def one_gives_up(seed: int, queues: int, bug: str | None) -> tuple[list[Any], bool]:
    """Return what ranks were told, and whether anything was found."""
    with mpi_here(is_clean=False):
        ranks = MpiSimRanks(2, seed, queues, bug=bug, preempt=0.05)

        def main(rank: Rank) -> list[str]:
            found = failing(rank)
            # All that these streams were given ends, and so does what the user gives.
            rank.stream.synchronize()
            after = rank.array(np.ones(4, "f4"))
            value = rank.fetch(after)
            rank.stream.synchronize()
            assert value().tolist() == [1, 1, 1, 1]
            rank.finish()  # the host sees the end of what failed, too
            return found

        try:
            told = ranks.run(main)
            ranks.world.run_until_idle()
        except OrderingError:
            return [], True
        return told, bool(ranks.world.violations)


@pytest.mark.parametrize("queues", [1, 2, 8])
def test_a_failure_lets_all_streams_go(queues: int, seeds: range) -> None:
    for each in seeds:
        told, found = one_gives_up(each, queues, None)
        assert not found, f"seed {each}"
        assert all(any(said) for said in told), f"seed {each}: not told: {told}"


def test_streams_that_are_kept_are_caught(seeds: range) -> None:
    for each in seeds:
        assert one_gives_up(each, 8, "flags_kept")[1], f"seed {each}"


def a_held_call_fails(seed: int, queues: int, bug: str | None) -> bool:
    """Whether anything is found where what is before a call comes after its failure.

    The call's input is still to be copied then, and is written when the call has ended.
    """
    with mpi_here(is_clean=False):
        ranks = MpiSimRanks(2, seed, queues, bug=bug)

        def main(rank: Rank) -> None:
            x = rank.array(given(rank.rank, 0, 40))
            rank.comm.alltoall(x)  # to allocate may wait for the device
            held, source = rank.pin(64), rank.pin(x.nbytes)
            rank.device.flag_store(held, 0)
            rank.device.write(source, bytes(x.nbytes))
            rank.stream.synchronize()
            if rank.rank == 1:
                return
            stream = rank.stream.handle
            rank.device.wait_value32_geq(stream, held, 1)
            request = rank.comm.alltoall(x, nonblocking=True)
            request.be_quiet()
            request.wait()
            rank.device.memcpy_async(x.address, source, x.nbytes, stream)
            core_of(rank.comm).give_up("it was told to")
            rank.device.flag_store(held, 1)
            rank.stream.synchronize()
            rank.finish()

        try:
            ranks.run(main)
            ranks.world.run_until_idle()
        except OrderingError:
            return True
        return bool(ranks.world.violations)


@pytest.mark.parametrize("queues", [1, 2, 8])
def test_what_is_let_go_comes_after_the_start_all_the_same(
    queues: int, seeds: range
) -> None:
    for each in seeds:
        assert not a_held_call_fails(each, queues, None), f"seed {each}"
        assert queues == 1 or a_held_call_fails(each, queues, "not_started")


def run_case(groups: list[list[Any]], rank: Rank, *, cases: list[Case]) -> None:
    """Run cases one after the other, without waiting for any."""
    found = []
    for case in cases:
        attempt, arguments = Attempt(case, rank.rank), case.arguments(rank.rank)
        x = rank.array(attempt.x)
        out = x
        if attempt.out is not None and attempt.out is not attempt.x:
            out = rank.array(attempt.out)
        if out is not x or not operation(case.coll).in_place:
            arguments["out"] = out
        returned = getattr(rank.comm, case.coll)(x, backend="mpi", **arguments)
        if attempt.out is not None:
            assert returned is out, case
            found.append((attempt, rank.fetch(out)))
    rank.stream.synchronize()
    finish(groups, rank)
    for attempt, value in found:
        assert attempt.out is not None
        attempt.out[:] = value()
        attempt.result = attempt.out
        assert attempt.verdict() is None, f"{attempt.verdict()} ({attempt.case})"


COLLS = (
    *("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "alltoall"),
    *("gather", "scatter", "scan", "exscan"),
    *("allgatherv", "alltoallv", "gatherv", "scatterv", "reduce_scatterv"),
)


@pytest.mark.parametrize("coll", COLLS)
def test_every_operation_is_ordered(coll: str, seed: int) -> None:
    size = 2 + seed % 3
    cases = [
        Case(coll, size, None, count=count, root=root, in_place=in_place)
        for count, root, in_place in ((0, 0, True), (1, size - 1, False), (7, 1, True))
    ]
    run = partial(run_case, cases=cases)
    assert verdict(run, size, seed, QUEUES[seed % 4], None) == ""
