# SPDX-License-Identifier: Apache-2.0
"""The order of calls over memory of peers, on simulated devices; planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import Attempt, Case
from ipc_ranks import IpcSimRanks, ipc_here, verdict
from program_cases import draw
from staged_ranks import Rank, forget_ranks

from commrt import _native
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream
from commrt.vocabulary.operations import OPERATIONS

SEEDS, FULL_SEEDS = 2, 40
QUEUES = (0, 1, 2, 8)
COLLS = [spec.name for spec in OPERATIONS if spec.name != "alltoallv"]
OF_FAILURES = ("kept", "kept_behind", "told_late", "unasked")
"""Bugs of operations that fail: test_ipc_failures.py."""
BUGS = [bug for bug in _native.planted_peer_bugs() if bug not in OF_FAILURES]
LAZY_DEVICE = ("end_flag_early",)
"""Bugs only where the host is ahead of the device."""
SMALL = {"half_nbytes": 512, "communicators": 2}


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


class Part(DeviceArray):
    """A part of another array."""

    def __init__(self, whole: DeviceArray, start: int, count: int) -> None:
        self.device, self.dtype, self.readonly = whole.device, whole.dtype, False
        self.shape, self.nbytes = (count,), count * whole.dtype.itemsize
        self._address = whole.address + start * whole.dtype.itemsize
        self.owner = whole

    def _give_back(self) -> None:
        """It is not ours."""


def given(rank: int, number: int, count: int) -> Any:
    """Numbers whose sums are exact."""
    return np.arange(count, dtype="f4") + 10 * number + 100 * rank


def calls(groups: list[list[Any]], rank: Rank) -> None:
    """One and two shots, long and short, by other schedules, in two streams.

    Arrays are filled and fetched in the same streams, without the host waiting.
    """
    comms, size = groups[rank.rank], len(groups)
    other = DeviceStream(rank.device)
    checks: list[tuple[Callable[[], Any], Any]] = []
    requests: list[Any] = []
    ways: list[tuple[str, dict[str, int]]] = [
        ("direct", {"shots": 1}),
        ("ring", {}),
        ("direct", {"shots": 2, "chunk": 64}),
        ("direct", {"shots": 2}),
    ]
    for number in range(6):
        comm = comms[number % len(comms)]
        name, params = ways[number % len(ways)]
        count = (40, 33, 100)[number % 3]
        x = rank.array(given(rank.rank, number, count))
        nonblocking = number % 2 == 1
        how = {"algorithm": f"ipc/{name}", "params": params}
        request = comm.allreduce(x, nonblocking=nonblocking, **how)
        if nonblocking:
            requests.append(request)
            request.wait()
        wanted = sum(given(each, number, count) for each in range(size))
        checks.append((rank.fetch(x), wanted))
    # Only the root sends: nothing comes back that would order the next one.
    for number in range(5):
        root, x = size - 1, rank.array(given(rank.rank, number, 50))
        comms[0].bcast(x, root=root, algorithm="ipc/binomial")
        checks.append((rank.fetch(x), given(root, number, 50)))
    # NCCL's form of in place: what is written is read, too, and put away first.
    whole = rank.array(given(rank.rank, 7, 9 * size))
    own = Part(whole, 9 * rank.rank, 9)
    comms[0].reduce_scatter(whole, out=own, algorithm="ipc/direct")
    wanted = sum(given(each, 7, 9 * size) for each in range(size))
    checks.append((rank.fetch(own), wanted[9 * rank.rank :][:9]))
    # In another stream, by an array that the first one fills.
    x = rank.array(given(rank.rank, 8, 3))
    event = rank.device.event_create()
    rank.device.event_record(event, rank.stream.handle)
    rank.device.stream_wait_event(other.handle, event)
    request = comms[-1].allreduce(x, nonblocking=True, stream=other, backend="ipc")
    requests.append(request)
    request.wait(stream=rank.stream)
    checks.append((rank.fetch(x), sum(given(each, 8, 3) for each in range(size))))
    for request in requests:
        request.synchronize()
    # The host has seen the end: it may give the array to any stream.
    x = rank.array(given(rank.rank, 9, 64))
    comms[0].allreduce(x, nonblocking=True, backend="ipc").synchronize()
    checks.append(
        (rank.fetch_in(x, other), sum(given(each, 9, 64) for each in range(size)))
    )
    for stream in (rank.stream, other):
        stream.synchronize()
    for value, wanted in checks:
        assert np.array_equal(value(), wanted), f"rank {rank.rank}"
    other.destroy()


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_order_is_right_whatever_happens_when(
    size: int, queues: int, seeds: range
) -> None:
    found = {each: verdict(calls, size, each, queues, None, **SMALL) for each in seeds}
    assert {each: what for each, what in found.items() if what} == {}


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, seeds: range
) -> None:
    options: dict[str, Any] = {"preempt": 0.05} if bug in LAZY_DEVICE else {}
    options |= SMALL
    missed = [
        each for each in seeds if not verdict(calls, 2, each, queues, bug, **options)
    ]
    assert missed == []


def test_flags_count_on_beyond_their_largest_value(seed: int) -> None:
    """Those of calls, which the host sees, and those between ranks."""
    for before in (3, 8):
        start = {**SMALL, "first_value": 2**32 - before}
        assert verdict(calls, 2, seed, 8, None, **start) == ""


def run_case(groups: list[list[Any]], rank: Rank, *, cases: list[Case]) -> None:
    """Run cases one after the other, without waiting for any."""
    found = []
    for case in cases:
        attempt = Attempt(case, rank.rank)
        arguments = case.arguments(rank.rank)
        if case.coll == "barrier":
            rank.comm.barrier(stream=rank.stream, **arguments)
            continue
        x = rank.array(attempt.x)
        if attempt.out is None or attempt.out is attempt.x:
            out = x
        else:
            out = arguments["out"] = rank.array(attempt.out)
        returned = getattr(rank.comm, case.coll)(x, **arguments)
        if attempt.out is not None:
            assert returned is out, case
            found.append((attempt, rank.fetch(out)))
    rank.stream.synchronize()
    for attempt, value in found:
        assert attempt.out is not None
        attempt.out[:] = value()
        attempt.result = attempt.out
        assert attempt.verdict() is None, f"{attempt.verdict()} ({attempt.case})"


@pytest.mark.parametrize("coll", COLLS)
def test_every_operation_is_ordered(coll: str, seed: int) -> None:
    rng = random.Random(f"{coll} {seed}")
    size = rng.choice([2, 3, 4])
    cases: list[Case] = []
    while len(cases) < 3:
        case = draw(coll, size, rng)
        if case.count <= 64:
            cases.append(replace_algorithm(case))
    run = partial(run_case, cases=cases)
    queues = rng.choice(QUEUES)
    assert verdict(run, size, seed, queues, None, half_nbytes=1 << 13) == ""


def replace_algorithm(case: Case) -> Case:
    """Return the case over memory of peers."""
    return Case(**{**case.describe(), "algorithm": f"ipc/{case.algorithm}"})


def test_the_end_waits_for_readers(seed: int) -> None:
    """A rank frees its memory once nobody has it open; the simulation watches it."""

    def main(rank: Rank) -> None:
        rank.comm.bcast(rank.array(given(rank.rank, 0, 50)), backend="ipc")
        if rank.rank == 0:
            rank.finish()
            core_of(rank.comm).attached["ipc"].close()
        rank.stream.synchronize()

    with ipc_here():
        ranks = IpcSimRanks(3, seed)
        ranks.run(main)
        ranks.close()
