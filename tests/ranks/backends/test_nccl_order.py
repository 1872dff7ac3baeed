# SPDX-License-Identifier: Apache-2.0
"""The order of calls by NCCL, alone and between other engines, on simulated devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from nccl_ranks import NcclSimRanks, nccl_here
from staged_ranks import Rank, forget_ranks

from commrt import _native
from commrt.devices import DeviceStream
from commrt.errors import CommError, OrderingError

SEEDS, FULL_SEEDS = 2, 60
GOOD_SEEDS, FULL_GOOD_SEEDS = 6, 200
QUEUES = (0, 1, 2, 8)
SMALL = {"slots": 2, "first_nbytes": 1024, "most_nbytes": 4096}
OF_FAILURES = ("kept",)
"""Bugs of operations that fail; ``unlocked`` needs two threads."""
OF_THREADS = ("unlocked",)
OF_BOXES = ("pack_late", "unpack_early", "unpack_other")
"""Bugs of calls among neighbours."""
BUGS = [
    bug
    for bug in _native.planted_nccl_bugs()
    if bug not in (*OF_FAILURES, *OF_THREADS, *OF_BOXES)
    and not bug.startswith("graph_")
]


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


class WrongSumError(AssertionError):
    """The numbers are not the right ones."""


def given(rank: int, number: int, count: int) -> Any:
    """Numbers whose sums are exact."""
    return np.arange(count, dtype="f4") + 10 * number + 100 * rank


def check(rank: Rank, what: str, value: Any, wanted: Any) -> None:
    if not np.array_equal(value, wanted):
        raise WrongSumError(f"rank {rank.rank}, {what}: {value}, not {wanted}")


def calls(groups: list[list[Any]], rank: Rank) -> None:
    """Blocking and nonblocking ones in two streams, on two communicators in turn.

    Their arrays are filled and fetched in the same streams, without the host waiting.
    """
    comms = groups[rank.rank]
    other = DeviceStream(rank.device)
    size = len(groups)
    checks: list[tuple[str, Callable[[], Any], Any]] = []
    requests = []
    for number in range(6):
        comm = comms[number % len(comms)]
        count = 4 * size * (number + 1)
        x = rank.array(given(rank.rank, number, count))
        wanted = sum(given(each, number, count) for each in range(size))
        if number % 3 == 2:
            blocks = [
                np.split(given(each, number, count), size) for each in range(size)
            ]
            wanted = np.concatenate([each[rank.rank] for each in blocks])
            request = comm.alltoall(x, nonblocking=True)
            requests.append(request)
            request.be_quiet()
            request.wait()
        elif number % 3 == 1:
            comm.allreduce(x)
        else:
            request = comm.allreduce(x, nonblocking=True)
            requests.append(request)
            request.be_quiet()
            request.wait()
        checks.append((f"call {number}", rank.fetch(x), wanted))
    # Three at once, of which no stream but the device's own orders any two.
    first = comms[0].allreduce(rank.array(given(0, 8, 5)), nonblocking=True)
    comms[-1].allreduce(rank.array(given(0, 9, 5)))
    # In another stream, by an array that the first one fills.
    x = rank.array(given(rank.rank, 7, 3))
    filled = rank.device.event_create()
    rank.device.event_record(filled, rank.stream.handle)
    rank.device.stream_wait_event(other.handle, filled)
    comms[0].allreduce(x, stream=other)
    request = comms[-1].allreduce(x, nonblocking=True, stream=other)
    requests.append(request)
    request.be_quiet()
    request.wait()
    wanted = size * sum(given(each, 7, 3) for each in range(size))
    checks.append(("the other stream", rank.fetch(x), wanted))
    for request in [*requests, first]:
        request.synchronize()
    # The host has seen the end: it may give the array to any stream.
    x = rank.array(given(rank.rank, 10, 64))
    request = comms[0].allreduce(x, nonblocking=True)
    request.be_quiet()
    while not request.done:  # synchronize() asks the device, too, and learns from it
        rank.device.pause()
    value = rank.fetch_in(x, other)
    other.synchronize()
    checks.append(
        ("seen by the host", value, sum(given(i, 10, 64) for i in range(size)))
    )
    rank.stream.synchronize()
    for what, value, wanted in checks:
        check(rank, what, value(), wanted)
    other.destroy()


def verdict(
    seed: int,
    queues: int,
    bug: str | None,
    run: Callable[[list[list[Any]], Rank], None] = calls,
    **options: Any,
) -> str:
    """What is found: "", or any of "race", "deadlock", "wrong" and "nccl"."""
    found = set()
    # What a bug has stopped ends no sooner for being waited for.
    with nccl_here(is_clean=False, grace_s=5.0 if bug is None else 0.0) as nccl:
        ranks = NcclSimRanks(
            2, seed, queues, bug=bug, communicators=2, staging=SMALL, **options
        )
        try:
            ranks.run(partial(run, ranks.groups))
            if not ranks.world.violations and not nccl.violations():
                ranks.close()
        except AssertionError:
            if bug is None:
                raise
            found.add("wrong")
        except OrderingError as error:
            found.add(error.status)
        except CommError:
            if bug is None:
                raise
            found.add("error")
        if ranks.world.violations:
            found.add("race")
        if nccl.violations():
            found.add("nccl")
        if found:
            forget_ranks()
    return " and ".join(sorted(found))


@pytest.mark.parametrize("queues", QUEUES)
def test_the_order_is_right_whatever_happens_when(
    queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS))
    wrong = {each: found for each in seeds if (found := verdict(each, queues, None))}
    assert wrong == {}


@pytest.mark.parametrize("queues", [1, 2, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, seeds: range
) -> None:
    assert [each for each in seeds if not verdict(each, queues, bug)] == []
