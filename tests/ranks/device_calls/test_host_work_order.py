# SPDX-License-Identifier: Apache-2.0
"""The order of calls whose work is the host's, on simulated devices, with bugs planted
in it; and that none of them blocks its caller."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from host_work_ranks import HostWorkRanks
from staged_ranks import (
    Rank,
    WrongResultError,
    forget_ranks,
    found_by,
    hides_from,
    on_threads,
)

import commrt
from commrt import _native
from commrt.comm import core_of
from commrt.device_calls import host_thread, host_work
from commrt.devices import DeviceArray, DeviceStream
from commrt.errors import CommError, RevokedError

F = np.float32
SEEDS, FULL_SEEDS = 1, 40
GOOD_SEEDS, FULL_GOOD_SEEDS = 2, 200
FAILING = ("flags_kept", "not_copied")
"""Bugs of calls that fail."""
ONE_QUEUE = ("late_copy",)
"""Bugs only where streams share a hardware queue."""
OF_LEAKS = ("block_lost", "references_kept")
"""What is left behind."""
LAZY_DEVICE = (
    "ungated",
    "early_recycling",
    "read_recycling",
    "end_early",
    "end_flag_early",
)
"""Bugs only where the host is ahead of the device."""
BUGS = [
    bug
    for bug in _native.planted_host_work_bugs()
    if bug not in (*FAILING, *ONE_QUEUE, *OF_LEAKS)
]


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


def given(rank: int, number: int, count: int) -> Any:
    """Numbers that float16 has, and whose sums it has, too."""
    return (np.arange(count) % 50 + 3 * number + 100 * rank).astype(F)


def total(number: int, count: int) -> Any:
    """Their sum over two ranks."""
    return given(0, number, count) + given(1, number, count)


def sparse(rank: int, number: int, count: int, length: int) -> tuple[Any, Any, Any]:
    """Indices and values, and what of two ranks is the sum."""

    def of(each: int) -> tuple[Any, Any]:
        step = max(1, length // max(1, count))
        indices = (np.arange(count) * step + each) % max(1, length)
        return np.unique(indices).astype(np.int32), each

    whole = np.zeros(length, F)
    for each in range(2):
        indices, _ = of(each)
        whole[indices] += indices + number + each
    indices, _ = of(rank)
    return indices, (indices + number + rank).astype(F), whole


Found = list[tuple[Callable[[], Any], Any]]


def compressed(rank: Rank, found: Found) -> None:
    """Calls in a row, on memory that streams were just told to fill, and fill again."""
    comm, aside = rank.comm, DeviceStream(rank.device)
    rank.asides.append(aside)
    kept = []
    for number, count in enumerate((33, 300, 1, 0, 40, 40, 40, 40)):
        stream = aside if number % 3 == 1 else rank.stream
        x = rank.array_in(given(rank.rank, number, count), stream)
        out = rank.array_in(np.full(count, -1, F), stream)
        how: dict[str, Any] = {"compress": "float16", "stream": stream}
        if number % 2:
            request = comm.allreduce(x, out=out, nonblocking=True, **how)
            request.be_quiet()  # a run that ends in the middle drops it
            kept.append((request, out, x, stream, number, count))
            continue
        comm.allreduce(x, out=out, **how)
        if stream is rank.stream and count:
            rank.fill(x, -7.0)  # the stream is behind the call
        found.append((rank.fetch_in(out, stream), total(number, count)))
    for request, out, x, stream, number, count in reversed(kept):
        request.wait(stream=stream)
        found.append((rank.fetch_in(out, stream), total(number, count)))
        if stream is rank.stream and count:
            rank.fill(x, -7.0)


def summed(rank: Rank, found: Found) -> None:
    """Sparse sums: into arrays, into new ones, and of unknown length."""
    comm = rank.comm
    requests = []
    for number, (count, length) in enumerate(((5, 60), (0, 7), (30, 40), (1, 1))):
        indices, values, whole = sparse(rank.rank, number, count, length)
        x = rank.array(indices), rank.array(values), (length,)
        out = rank.array(np.full(length, -1, F))
        request = comm.sparse_allreduce(x, out=out, nonblocking=True)
        request.be_quiet()
        new = comm.sparse_allreduce(x, result="dense")
        rank.arrays.append(new)
        found.append((rank.fetch(new), whole))
        late = comm.sparse_allreduce(x, result="sparse", nonblocking=True)
        late.be_quiet()
        requests.append((request, late, x, out, whole))
    for request, late, x, out, whole in requests:
        request.wait()
        found.append((rank.fetch(out), whole))
        got = late.wait()
        rank.arrays += [got.indices, got.values]
        at = rank.fetch(got.indices)
        found.append((rank.fetch(got.values), lambda at=at, whole=whole: whole[at()]))
        for each in x[:2]:
            rank.fill(each, -7)  # behind all that read it


def owed(rank: Rank, found: Found) -> None:
    """The largest elements, and what is left of the others."""
    comm = rank.comm
    for number in range(2):
        had = given(rank.rank, number, 24)
        x, residual = rank.array(had), rank.array(np.ones(24, F))
        got = comm.topk_allreduce(x, 4, residual=residual)
        rank.arrays += [got.indices, got.values]
        at, left = rank.fetch(got.indices), rank.fetch(residual)

        def rest(at: Any = at, had: Any = had) -> Any:
            mine = np.argsort(-(had + 1), kind="stable")[:4]
            wanted = had + 1
            wanted[np.intersect1d(at(), mine)] = 0
            return wanted

        found.append((left, rest))
        rank.fill(x, -7.0)
        rank.fill(residual, -7.0)


def largest(rank: Rank, found: Found) -> None:
    """Results of unknown length, several at a time: nothing is written before."""
    requests = []
    for number in range(6):
        x = rank.array(given(rank.rank, number, 40))
        requests.append((rank.comm.topk_allreduce(x, 40, nonblocking=True), x))
        requests[-1][0].be_quiet()
    for number, (request, x) in enumerate(requests):
        got = request.wait()
        rank.arrays += [got.indices, got.values]
        found.append((rank.fetch(got.values), total(number, 40)))
        rank.fill(x, -7.0)


ADDED = commrt.reduction(np.add, commutative=True)
"""A function of Python as reduction."""


def reduced(rank: Rank, found: Found) -> None:
    """Functions of Python as reductions, on memory that is filled again behind."""
    comm = rank.comm
    kept = []
    for number, count in enumerate((20, 0, 200)):
        x = rank.array(given(rank.rank, number, count))
        out = rank.array(np.full(count, -1, F))
        request = comm.allreduce(x, out=out, op=ADDED, nonblocking=True)
        request.be_quiet()
        kept.append((request, out, x, number, count))
        y = rank.array(given(rank.rank, number, count))
        comm.allreduce(y, op=ADDED)
        found.append((rank.fetch(y), total(number, count)))
    for request, out, x, number, count in kept:
        request.wait()
        found.append((rank.fetch(out), total(number, count)))
        if count:
            rank.fill(x, -7.0)


def check(rank: Rank, found: Found) -> None:
    """See that all that was fetched is what it should be."""
    rank.finish()
    rank.stream.synchronize()
    for aside in rank.asides:
        aside.synchronize()
        aside.destroy()
    for number, (value, want) in enumerate(found):
        wanted = want() if callable(want) else want
        if not np.array_equal(value(), wanted):
            raise WrongResultError(
                f"rank {rank.rank}, {number}: {value()}, not {wanted}"
            )


def all_of_it(rank: Rank) -> None:
    found: Found = []
    compressed(rank, found)
    summed(rank, found)
    largest(rank, found)
    owed(rank, found)
    reduced(rank, found)
    check(rank, found)


def without_indices(rank: Rank) -> None:
    """What bugs may do harm to: wrong indices would do it to this process."""
    found: Found = []
    compressed(rank, found)
    largest(rank, found)
    owed(rank, found)
    check(rank, found)


def gated(rank: Rank) -> None:
    """The caller's stream waits for what the host does after all calls and waits."""
    comm, found = rank.comm, []
    gate = rank.pin(64)
    rank.device.flag_store(gate, 0)
    rank.device.wait_value32_geq(rank.stream.handle, gate, 1)
    x, y, z = (rank.array(given(rank.rank, number, 20)) for number in range(3))
    assert comm.allreduce(z, op=ADDED) is z
    request = comm.allreduce(x, compress="float16", nonblocking=True)
    request.be_quiet()
    assert not request.test()
    assert request.wait() is x
    assert comm.allreduce(y, compress="float16") is y
    indices, values, whole = sparse(rank.rank, 1, 5, 60)
    entries = rank.array(indices), rank.array(values), (60,)
    out = rank.array(np.full(60, -1, F))
    assert comm.sparse_allreduce(entries, out=out) is out
    new = comm.sparse_allreduce(entries, result="dense")
    rank.arrays.append(new)
    late = comm.sparse_allreduce(entries, nonblocking=True, result="sparse")
    late.be_quiet()
    for array, want in (
        (x, total(0, 20)),
        (y, total(1, 20)),
        (z, total(2, 20)),
        (out, whole),
        (new, whole),
    ):
        found.append((rank.fetch(array), want))
    rank.device.flag_store(gate, 1)
    got = late.wait()
    rank.arrays += [got.indices, got.values]
    check(rank, found)


def verdict(
    function: Callable[[Rank], None],
    seed: int,
    queues: int,
    bug: str | None,
    **how: Any,
) -> str:
    """What is found: "", or any of "race", "deadlock" and "wrong"."""
    # Arrays are made while calls are under way.
    how = {"alloc_syncs": False, "pinned_alloc_syncs": False, **how}
    if bug in LAZY_DEVICE:
        how.setdefault("preempt", 0.05)
    try:
        return found_by(HostWorkRanks(2, seed, queues, bug=bug, **how), function)
    except CommError as error:  # what came is no sparse vector, or another call's
        forget_ranks()
        return type(error).__name__


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
@pytest.mark.parametrize("function", [all_of_it, gated])
def test_calls_are_ordered_whatever_happens_when(
    function: Callable[[Rank], None], queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS))
    wrong = {
        each: found
        for each in seeds
        if (found := verdict(function, each, queues, None))
    }
    assert wrong == {}


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, seeds: range
) -> None:
    # Where the host has to be ahead, one interleaving in a hundred hides it.
    tries = 3 if bug in LAZY_DEVICE else 1

    def is_found(each: int) -> bool:
        return any(
            verdict(without_indices, each + n * FULL_SEEDS, queues, bug)
            for n in range(tries)
        )

    assert [each for each in seeds if not is_found(each)] == []


@pytest.mark.parametrize("bug", ONE_QUEUE)
def test_a_copy_that_is_given_late_is_a_deadlock(bug: str, seeds: range) -> None:
    assert all("deadlock" in verdict(without_indices, each, 1, bug) for each in seeds)


# --- bugs in what runs the host's part ---


def out_of_order(rank: Rank) -> None:
    """Streams that come to their calls in another order on the other rank."""
    comm, found = rank.comm, []
    streams = [rank.stream, DeviceStream(rank.device)]
    rank.asides.append(streams[1])
    gate = rank.pin(64)
    rank.device.flag_store(gate, 0)
    held = streams[rank.rank]
    rank.device.wait_value32_geq(held.handle, gate, 1)
    for number, stream in enumerate(streams):
        x = rank.array_in(given(rank.rank, number, 20), stream)
        comm.allreduce(x, compress="float16", stream=stream)
        found.append((rank.fetch_in(x, stream), total(number, 20)))
    for _ in range(400):  # others go on meanwhile
        rank.device.flag_load(gate)
    rank.device.flag_store(gate, 1)
    check(rank, found)


def dropped(rank: Rank) -> None:
    """An array that nobody but the call keeps lives until the call has ended."""
    under_way = []

    class Watched(DeviceArray):
        def __del__(self) -> None:
            under_way.append(core_of(rank.comm).devices.outstanding)
            super().__del__()

    x = rank.array(given(rank.rank, 0, 40))
    rank.arrays.remove(x)
    x.__class__ = Watched
    rank.comm.allreduce(x, compress="float16")
    del x
    rank.finish()
    rank.stream.synchronize()
    _native.drop_ended(core_of(rank.comm).world.engine)  # as the next call would
    if any(under_way):
        raise WrongResultError("an array is gone that a call under way writes to")


def _over_at_once(patch: pytest.MonkeyPatch) -> None:
    plain = host_thread.HostJob._start

    def start(self: host_thread.HostJob, blocks: bool) -> bool:
        moved = plain(self, blocks)
        if moved:
            self.work.done(self.call)
        return moved

    patch.setattr(host_thread.HostJob, "_start", start)


def _results_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    plain = host_work.HostResultRequest._give_result

    class Nothing:
        def wait_on(self, stream: int) -> None:
            """Let nothing wait."""

    def give(self: host_work.HostResultRequest, stream: int) -> None:
        plain(self, stream)
        self._given = Nothing()

    patch.setattr(host_work.HostResultRequest, "_give_result", give)


def _kept_by_nobody(patch: pytest.MonkeyPatch) -> None:
    plain = host_thread.HostJobs.start

    def start(self: Any, device: Any, arrays: Any, stream: int, keep: Any, *more: Any,
              **how: Any) -> Any:  # fmt: skip
        job = plain(self, device, arrays, stream, (), *more, **how)
        begin = job._begin
        # The host's part knows where things are, and keeps no array.
        begin._call = lambda channel, copy_of, call=begin._call: call(channel, copy_of)
        return job

    patch.setattr(host_thread.HostJobs, "start", start)


JOB_BUGS: dict[
    str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Rank], None]]
] = {
    "a job is over when it begins": (_over_at_once, without_indices),
    "no wait for the copy of a result": (_results_not_waited_for, without_indices),
    "arrays kept by nobody": (_kept_by_nobody, dropped),
}
SWITCHES: dict[Callable[[Rank], None], dict[str, Any]] = {
    out_of_order: {},
    without_indices: {},
    dropped: {},
}


def outcome_of(function: Callable[[Rank], None], seed: int) -> str:
    return verdict(function, seed, 8, None, **SWITCHES[function])


@pytest.mark.parametrize("function", [out_of_order, dropped])
def test_neither_streams_nor_dropped_arrays_disturb(
    function: Callable[[Rank], None], seeds: range
) -> None:
    assert [each for each in seeds if outcome_of(function, each)] == []


@pytest.mark.parametrize("bug", JOB_BUGS)
def test_a_bug_in_the_hosts_part_is_caught(
    bug: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, function = JOB_BUGS[bug]
    plant(monkeypatch)
    # The moment in which an array that is kept too short goes is in half of all seeds.
    tries = 12 if function is dropped else 1

    def is_found(each: int) -> bool:
        return any(outcome_of(function, each + n * FULL_SEEDS) for n in range(tries))

    assert [each for each in seeds if not is_found(each)] == []


# --- failures ---


def outcome(request: Any) -> str:
    """What a request says in the end, by the name of its error."""
    try:
        request.synchronize()
    except CommError as error:
        return type(error).__name__
    return ""


def give_up(rank: Rank) -> list[str]:
    """Give up what streams wait for: on one rank what the other one waits for."""
    comm = rank.comm
    requests = []
    with suppress(RevokedError):
        for number in range(1 if rank.rank else 3):
            x = rank.array(given(rank.rank, number, 40))
            out = rank.array(np.zeros(40, F))
            requests.append(
                comm.allreduce(x, out=out, compress="float16", nonblocking=True)
            )
            requests[-1].be_quiet()
            requests[-1].wait()  # the second one never comes: the stream is let go
    if rank.rank:
        core_of(comm).give_up("it was told to")
    rank.stream.synchronize()
    return [outcome(request) for request in requests[1:]]


@pytest.mark.parametrize("queues", [1, 8])
def test_who_gives_up_lets_all_streams_go(queues: int, seeds: range) -> None:
    for each in seeds:
        ranks = HostWorkRanks(2, each, queues, preempt=0.05)
        found = ranks.run(give_up)
        ranks.world.check()
        assert {*found[0], "RevokedError"} == {"RevokedError"}, f"seed {each}"
        forget_ranks()


def gives_up(rank: Rank) -> list[str]:
    """Give up at once, with copies on their way."""
    comm = rank.comm
    requests = []
    for number in range(3):
        x = rank.array(given(rank.rank, number, 40))
        requests.append(comm.allreduce(x, compress="float16", nonblocking=True))
        requests[-1].be_quiet()
        with suppress(RevokedError):  # the other rank may have given up by now
            requests[-1].wait()
    core_of(comm).give_up("it was told to")
    rank.stream.synchronize()
    return [outcome(request) for request in requests]


@pytest.mark.parametrize("bug", FAILING)
def test_a_failure_with_a_planted_bug_is_caught(bug: str, seeds: range) -> None:
    def ranks_of(seed: int) -> HostWorkRanks:
        return HostWorkRanks(2, seed, 8, bug=bug, preempt=0.05)

    assert hides_from(seeds, ranks_of, gives_up) == []


# --- what is left ---


def many(rank: Rank) -> tuple[int, int]:
    """Pinned memory, and arrays that are still there, after many calls."""
    kept = []
    for number in range(40):
        x = rank.array(given(rank.rank, number, 1000))
        kept.append(weakref.ref(x))
        rank.arrays.remove(x)
        rank.comm.allreduce(x, compress="float16", nonblocking=True).synchronize()
        del x
    rank.finish()
    rank.comm.barrier()  # what has ended goes with the next call
    work = core_of(rank.comm).devices.host_jobs.work(rank.device)
    return work.pinned_nbytes, sum(each() is not None for each in kept)


@pytest.mark.parametrize("bug", [None, *OF_LEAKS])
def test_nothing_is_left_behind(bug: str | None, seed: int) -> None:
    ranks = HostWorkRanks(
        1, seed, bug=bug, preempt=0.0, staging={"first_nbytes": 1 << 16}
    )
    pinned_nbytes, arrays = ranks.run(many)[0]
    assert (pinned_nbytes > 1 << 17) == (bug == "block_lost")
    assert (arrays > 2) == (bug == "references_kept")
    if bug is None:
        ranks.close()
    else:
        forget_ranks()


# --- on threads ---


@pytest.mark.parametrize("queues", ["flags", "events"])
def test_calls_on_devices_of_threads(queues: str, seed: int) -> None:
    on_threads(2, all_of_it, memory_flags=queues == "flags", seed=seed)


def test_no_call_blocks_its_caller(seed: int) -> None:
    on_threads(2, gated, seed=seed)
