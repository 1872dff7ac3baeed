# SPDX-License-Identifier: Apache-2.0
"""The order of buckets on simulated devices, and bugs planted in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, SimRanks, WrongResultError, forget_ranks, found_by
from test_fused_device import ones

from commrt.devices import DeviceStream
from commrt.fusion.device_copies import BucketCopies
from commrt.fusion.device_requests import SentBucket

F = np.float32
SEEDS, FULL_SEEDS = 2, 40


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


def given(rank: int, number: int, count: int) -> Any:
    """Numbers whose sums are exact."""
    return np.arange(count, dtype=F) * (number + 1) + 100 * rank


def rounds(rank: Rank) -> None:
    """Buckets in a row, of two streams, on memory that these were just told to fill.

    The ring has two of them, so each waits for one before. Nothing else orders them:
    no stream waits for any, nor does the host, until all is given.
    """
    comm, other = rank.comm, DeviceStream(rank.device)
    started, values = [], []
    for number in range(9):
        with comm.fused(nbytes=100):
            for i, stream in enumerate((rank.stream, other, rank.stream)):
                x = rank.array_in(given(rank.rank, number + i, 5 + i), stream)
                request = comm.allreduce(x, nonblocking=True, stream=stream)
                request.be_quiet()  # a run that ends in the middle drops it
                total = 2 * given(0, number + i, 5 + i) + 100
                started.append((request, x, stream, total))
    for request, x, stream, total in started:
        request.wait(stream=stream)
        values.append((rank.fetch_in(x, stream), total))
    for request, *_ in started:
        request.synchronize()
    for stream in (rank.stream, other):
        stream.synchronize()
    other.destroy()
    for number, (value, wanted) in enumerate(values):
        if not np.array_equal(value(), wanted):
            raise WrongResultError(
                f"rank {rank.rank}, {number}: {value()}, not {wanted}"
            )


def gated(rank: Rank) -> None:
    """The caller's stream waits for the end of what it was to come before."""
    gate = rank.pin(64)
    rank.device.flag_store(gate, 0)
    x = ones(rank)
    with rank.comm.fused(nbytes=100):
        request = rank.comm.allreduce(x, nonblocking=True)
        request.be_quiet()
        rank.device.wait_value32_geq(rank.stream.handle, gate, 1)
    request.synchronize()
    rank.device.flag_store(gate, 1)
    rank.stream.synchronize()


def let_go_early(rank: Rank) -> None:
    """Arrays that the caller drops, and whose memory is freed with them."""
    for _ in range(3):
        with rank.comm.fused(nbytes=100):
            for n in (3, 4):
                x = rank.array(given(rank.rank, n, n))
                rank.arrays.remove(x)
                rank.comm.allreduce(x, nonblocking=True).be_quiet()
                del x
    rank.finish()
    rank.stream.synchronize()


def skip(self: Any, *args: Any) -> None:
    """In the place of what orders something."""


def _noted_at_the_cut(patch: pytest.MonkeyPatch) -> None:
    plain = BucketCopies._await_calls

    def late(self: BucketCopies, parts: Any) -> None:
        for each in parts:
            self.device.event_record(each.ready.handle, each.stream)
        plain(self, parts)

    patch.setattr(BucketCopies, "_await_calls", late)


def _one_stream_only(patch: pytest.MonkeyPatch) -> None:
    plain = BucketCopies._await_calls
    patch.setattr(
        BucketCopies, "_await_calls", lambda self, parts: plain(self, parts[-1:])
    )


def _first_calls_only(patch: pytest.MonkeyPatch) -> None:
    plain = BucketCopies._await_calls
    patch.setattr(
        BucketCopies, "_await_calls", lambda self, parts: plain(self, parts[::-1])
    )


def _tables_beside(patch: pytest.MonkeyPatch) -> None:
    plain = BucketCopies._table

    def table(self: BucketCopies, kind: Any, lengths: Any, stream: int) -> Any:
        return plain(self, kind, lengths, self.puts_back.handle)

    patch.setattr(BucketCopies, "_table", table)


def _behind_the_gather(patch: pytest.MonkeyPatch) -> None:
    def follow(self: SentBucket) -> None:
        copies = self._copies
        gathered = copies.note(copies.gathers.handle)
        copies.device.stream_wait_event(copies.puts_back.handle, gathered.handle)

    patch.setattr(SentBucket, "_follow_collective", follow)


def _no_end_wait(patch: pytest.MonkeyPatch) -> None:
    def wait_on(self: SentBucket, stream: int) -> None:
        self.put_back()

    patch.setattr(SentBucket, "wait_on", wait_on)


def _end_of_the_collective(patch: pytest.MonkeyPatch) -> None:
    def wait_on(self: SentBucket, stream: int) -> None:
        self.put_back()
        self.request.wait(stream=stream)

    patch.setattr(SentBucket, "wait_on", wait_on)


def _end_noted_early(patch: pytest.MonkeyPatch) -> None:
    plain = BucketCopies.put_back

    def put_back(self: BucketCopies, parts: Any, block: Any) -> Any:
        end = self.note(self.puts_back.handle)
        plain(self, parts, block)
        return end

    patch.setattr(BucketCopies, "put_back", put_back)


def _arrays_let_go(patch: pytest.MonkeyPatch) -> None:
    plain = SentBucket._put_back

    def put_back(self: SentBucket) -> None:
        plain(self)
        self._arrays = []

    patch.setattr(SentBucket, "_put_back", put_back)


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Rank], None]]] = {
    "not after the calls": (
        lambda patch: patch.setattr(BucketCopies, "_await_calls", skip),
        rounds,
    ),
    "after the cut": (_noted_at_the_cut, gated),
    "after one of the streams": (_one_stream_only, rounds),
    "after the first calls of streams": (_first_calls_only, rounds),
    "tables copied beside their launches": (_tables_beside, rounds),
    "memory used again too early": (
        lambda patch: patch.setattr(BucketCopies, "_await_block", skip),
        rounds,
    ),
    "put back before the end": (_behind_the_gather, rounds),
    "wait() for nothing": (_no_end_wait, rounds),
    "wait() for the collective": (_end_of_the_collective, rounds),
    "the end before the parts are back": (_end_noted_early, rounds),
    "arrays let go while parts come back": (_arrays_let_go, let_go_early),
}
SWITCHES: dict[Callable[[Rank], None], dict[str, Any]] = {
    # The host is ahead of the device, and nothing but what is tested keeps it back.
    rounds: {"alloc_syncs": False, "pinned_alloc_syncs": False, "preempt": 0.05},
    gated: {},
    let_go_early: {"free_syncs": False, "preempt": 0.05},
}


def verdict(function: Callable[[Rank], None], seed: int, queues: int) -> str:
    """What is found: "", or any of "race", "deadlock" and "wrong"."""
    ranks = SimRanks(2, seed, queues, **SWITCHES[function])
    for rank in ranks.ranks:
        rank.device.load_kernels(b"")
    return found_by(ranks, function)


RIGHT = [
    (function, queues)
    for function in (rounds, gated, let_go_early)
    for queues in ((0,) if function is gated else (0, 1, 2, 8))
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("function", "queues"), RIGHT)
def test_without_a_bug_nothing_is_found(
    function: Callable[[Rank], None], queues: int, seeds: range
) -> None:
    wrong = {
        each: found for each in seeds if (found := verdict(function, each, queues))
    }
    assert wrong == {}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, function = BUGS[bug]
    plant(monkeypatch)
    assert [each for each in seeds if not verdict(function, each, 0)] == []
