# SPDX-License-Identifier: Apache-2.0
"""The order of staged collectives, on simulated devices, and bugs planted in it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import Case, difference, expected, inputs, sample
from staged_ranks import (
    Rank,
    SimRanks,
    WrongResultError,
    forget_ranks,
    found_by,
    hides_from,
)

from commrt import _native
from commrt.comm import core_of
from commrt.errors import CommError, RevokedError
from commrt.vocabulary.operations import OPERATIONS, operation

SEEDS, FULL_SEEDS = 2, 100
GOOD_SEEDS, FULL_GOOD_SEEDS = 10, 300

SMALL = {"slots": 2, "first_nbytes": 1024, "most_nbytes": 1024}
"""So little memory that calls use that of the calls before."""
PIECE = 64
FAILING = ("flags_kept", "not_copied")
"""Bugs of operations that fail."""
ONE_QUEUE = ("late_copy",)
"""Bugs only where streams share a hardware queue."""
OF_BOXES = ("not_packed", "unpacked_early", "pack_aside", "unpack_aside")
"""Bugs only of calls that pack: test_staged_boxes.py has them."""
LAZY_DEVICE = ("early_recycling", "ring_unlocked", "end_flag_early")
"""Bugs only where the host is ahead of the device: who sees the end of a call may use
its memory, however it comes to it."""
OF_LEAKS = ("event_lost", "memory_kept", "references_kept")
"""What is left behind: test_staged_leaks.py."""
OF_KERNELS = ("kernel_aside", "kernel_back")
"""Bugs only where kernels copy: test_kernel_copies.py."""
OF_THE_END = ("given_back_early",)
"""Bugs of closed communicators that failed: test_deferred_release.py."""
OF_AGREEMENTS = ("unagreed", "agreement_unread", "words_in_place")
"""Bugs of calls that compare: test_staged_boxes.py and test_boxes_without_plans.py."""
OTHERS = (*FAILING, *ONE_QUEUE, *OF_BOXES, *OF_LEAKS, *OF_KERNELS, *OF_THE_END)
OTHERS += OF_AGREEMENTS
BUGS = [bug for bug in _native.planted_bugs() if bug not in OTHERS]


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


def given(rank: int, number: int, count: int) -> Any:
    """Numbers whose sums are exact."""
    return np.arange(count, dtype="f4") * (number + 1) + 100 * rank


COUNTS = (80, 16, 7, 9, *[16] * 12, 33, 80)
"""Of five pieces to one. Those of one piece leave it to the memory alone whether it is
free: within a call of many, events order it, too."""


def sums(rank: Rank, *, at_once: bool = False, **params: Any) -> None:
    """Start allreduces in a row, on memory that the stream was just told to fill.

    With ``at_once`` the stream waits for each as it is started.
    """
    params["piece"] = PIECE
    xs = [rank.array(given(rank.rank, i, count)) for i, count in enumerate(COUNTS)]
    requests = []
    for x in xs:
        rank.go_on()
        request = rank.comm.allreduce(x, nonblocking=True, params=params)
        request.be_quiet()  # a run that ends in the middle drops them
        requests.append(request)
        if at_once:
            request.wait()
    for request in requests:
        request.wait()
    found = [rank.fetch(x) for x in xs]
    for request in requests:
        rank.go_on()
        request.synchronize()
    rank.stream.synchronize()
    for i, (count, value) in enumerate(zip(COUNTS, found, strict=True)):
        wanted = given(0, i, count) + given(1, i, count)
        if not np.array_equal(value(), wanted):
            raise WrongResultError(
                f"rank {rank.rank}, call {i}: {value()}, not {wanted}"
            )


def verdict(seed: int, queues: int, bug: str | None, **switches: Any) -> str:
    """What is found: "", or any of "race", "deadlock" and "wrong"."""
    if bug in LAZY_DEVICE:
        switches.setdefault("preempt", 0.05)
    switches["ends_early"] = bug not in (None, *ONE_QUEUE)
    ranks = SimRanks(2, seed, queues, bug=bug, staging=SMALL, **switches)
    return found_by(ranks, partial(sums, at_once=bug in ONE_QUEUE))


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
def test_streams_that_take_few_commands_hold_up_nobody(
    queues: int, full: bool, seed: int
) -> None:
    """A long call has more of them; an H200's streams took 1020, and then the caller
    waited for what only the rest of its call could let go."""
    for each in range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS)):
        assert verdict(each, queues, None, most_commands=12) == "", each


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
def test_the_order_is_right_whatever_happens_when(
    queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS))
    wrong = {each: found for each in seeds if (found := verdict(each, queues, None))}
    assert wrong == {}


def test_flags_count_on_beyond_their_end(seeds: range) -> None:
    start = {**SMALL, "first_value": 2**32 - 5}
    for each in seeds:
        ranks = SimRanks(2, each, 2, staging=start)
        ranks.run(sums)
        ranks.close()


def one_case(rank: Rank, case: Case) -> str | None:
    """Run a case in the caller's stream; return what is wrong with its result."""
    spec = operation(case.coll)
    xs = inputs(case)
    want = expected(case, xs)[rank.rank]
    x = rank.array(xs[rank.rank])
    arguments = {**case.arguments(rank.rank), "nonblocking": True}
    if want is not None and not (case.in_place and spec.in_place):
        arguments["out"] = rank.array(np.ones(want.size, x.dtype))
    request = getattr(rank.comm, case.coll)(x, **arguments)
    out = request.wait()
    value = None if want is None else rank.fetch(out)
    request.synchronize()
    rank.stream.synchronize()
    if value is None or want is None:
        return None
    wrong = difference(case, xs, value(), want)
    return None if wrong is None else f"rank {rank.rank}: {wrong} ({case})"


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "coll", [spec.name for spec in OPERATIONS if spec.x_count != "none"]
)
def test_every_operation_is_ordered(
    coll: str, size: int, queues: int, seed: int, full: bool
) -> None:
    cases = [
        replace(case, params={**case.params, "piece": PIECE}, count=case.count % 300)
        for case in sample(coll, size, seed, 40 if full else 4)
    ]
    ranks = SimRanks(size, seed, queues, staging={"first_nbytes": 4096, "slots": 3})
    found = ranks.run(lambda rank: [one_case(rank, case) for case in cases])
    assert [wrong for each in found for wrong in each if wrong is not None] == []
    ranks.close()


def test_calls_leave_no_memory_behind(full: bool, seed: int) -> None:
    def main(rank: Rank) -> None:
        x = rank.array(np.zeros(8, "f4"))
        before = rank.stager.pinned_nbytes
        for _ in range(10_000 if full else 300):
            request = rank.comm.allreduce(x, nonblocking=True)
            request.wait()
            request.synchronize()
        assert rank.stager.pinned_nbytes == before
        assert rank.stager.num_events <= 2

    ranks = SimRanks(2, seed, staging={"first_nbytes": 4096})
    ranks.run(main)
    ranks.close()


def test_a_communicator_forgets_the_work_of_devices_that_are_gone() -> None:
    def num_works() -> list[int]:
        ranks = SimRanks(2, 0, staging=SMALL)
        ranks.run(sums)
        found = [core_of(rank.comm).num_device_work for rank in ranks.ranks]
        ranks.close()
        return found

    first = num_works()
    assert all(first)
    assert [num_works() for _ in range(3)] == [first] * 3


def test_what_the_last_calls_kept_goes_with_their_communicators() -> None:
    kept: list[weakref.ref[Any]] = []

    def main(rank: Rank) -> None:
        x = rank.array(np.ones(8, "f4"))
        kept.append(weakref.ref(x))
        rank.comm.allreduce(x)

    ranks = SimRanks(2, 0, staging=SMALL)
    ranks.run(main)
    ranks.close()
    forget_ranks()
    del ranks
    gc.collect()
    assert [each() for each in kept] == [None, None]


@pytest.mark.parametrize("queues", [1, 2, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, seeds: range
) -> None:
    assert [each for each in seeds if not verdict(each, queues, bug)] == []


@pytest.mark.parametrize("bug", ONE_QUEUE)
def test_what_is_given_late_is_a_deadlock_on_one_queue(bug: str, seeds: range) -> None:
    assert all("deadlock" in verdict(each, 1, bug) for each in seeds)


# --- failures ---


def outcome(request: Any) -> str:
    """What a request says in the end, by the name of its error."""
    try:
        request.synchronize()
    except CommError as error:
        return type(error).__name__
    return ""


def failing(fails: Any, rank: Rank) -> list[str]:
    """Start calls of which one fails; everything that was given still ends."""
    xs = [rank.array(given(rank.rank, i, count)) for i, count in enumerate(COUNTS[:6])]
    fails(rank, None)
    requests = []
    for i, x in enumerate(xs):
        try:
            given_x = fails(rank, i) or x
            requests.append(
                rank.comm.allreduce(given_x, nonblocking=True, params={"piece": PIECE})
            )
            if i % 2:
                requests[-1].wait()
        except CommError as error:
            return [*map(outcome, requests), type(error).__name__]
    return [outcome(request) for request in requests]


def mismatch(rank: Rank, number: int | None) -> Any:
    """The ranks call with different lengths."""
    if number == 2 and rank.rank == 1:
        return rank.array(np.zeros(9, "f4"))
    return None


def gone(rank: Rank, number: int | None) -> Any:
    """One rank gives up instead of calling."""
    if number == 3 and rank.rank == 1:
        core_of(rank.comm).give_up("it was told to")
        raise RevokedError("this rank")
    return None


@pytest.mark.parametrize("queues", [1, 2, 8])
@pytest.mark.parametrize("how", [mismatch, gone])
def test_a_failure_lets_all_streams_go(how: Any, queues: int, seeds: range) -> None:
    for each in seeds:
        ranks = SimRanks(2, each, queues, staging=SMALL)

        def main(rank: Rank) -> list[str]:
            found = failing(lambda *args: how(*args), rank)
            # All that these streams were given ends, and so does what the user gives.
            rank.stream.synchronize()
            after = rank.array(np.ones(4, "f4"))
            value = rank.fetch(after)
            rank.stream.synchronize()
            assert value().tolist() == [1, 1, 1, 1]
            rank.finish()  # the host sees the end of what failed, too
            return found

        found = ranks.run(main)
        ranks.world.check()
        ranks.world.run_until_idle()
        for said in found:
            assert said[-1], f"seed {each}: nobody was told: {found}"
        assert all(rank.stager.outstanding == 0 for rank in ranks.ranks)
        forget_ranks()


@pytest.mark.parametrize("bug", FAILING)
def test_a_failure_with_a_planted_bug_is_caught(bug: str, seeds: range) -> None:
    def ranks_of(seed: int) -> SimRanks:
        return SimRanks(2, seed, 8, bug=bug, staging=SMALL, preempt=0.05)

    def main(rank: Rank) -> None:
        failing(mismatch, rank)
        rank.stream.synchronize()

    assert hides_from(seeds, ranks_of, main) == []
