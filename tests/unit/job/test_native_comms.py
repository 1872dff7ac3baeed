# SPDX-License-Identifier: Apache-2.0
"""MPI communicators are lent, given back and lent again, by all ranks alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from commrt.bootstrap import ThreadWorld
from commrt.bootstrap.lending import Lease
from commrt.errors import BackendError, TimeoutError_
from commrt.job.mpi_comms import NativeComms


class NoMoreError(Exception):
    """What the fake MPI raises."""


class FakeMpi:
    """An MPI that has ``available`` communicators; counts how many it made."""

    def __init__(self, available: int = 100) -> None:
        self.available = available
        self.made = 0
        # Names as mpi4py spells them.
        group = SimpleNamespace(Free=lambda: None)
        group.Incl = lambda ranks: group
        self.Get_group = lambda: group
        self.Create_group = self._create

    def _create(self, group: object, tag: int) -> object:
        if self.made == self.available:
            raise NoMoreError
        self.made += 1
        return object()


@pytest.fixture
def lenders(run_threads: Any) -> Callable[..., list[Any]]:
    """Run a function per rank, which gets its rank and its lender."""

    def run(
        size: int, work: Callable[[int, NativeComms], Any], **fake: Any
    ) -> list[Any]:
        world = ThreadWorld(size)
        limit = fake.pop("limit", 10)

        def rank_main(rank: int) -> Any:
            available = fake.get("available", {}).get(rank, 100)
            mpi = FakeMpi(available)
            lender = NativeComms(mpi, world.bootstrap(rank), NoMoreError, limit)
            return work(rank, lender)

        results: list[Any] = run_threads(size, rank_main)
        return results

    return run


ALL = (0, 1, 2)


def lend(lender: NativeComms, number: int) -> Lease | None:
    return lender.lend(ALL, number, tag=17, timeout_s=300)


def test_what_was_given_back_is_lent_again(lenders: Any) -> None:
    def work(rank: int, lender: NativeComms) -> int:
        for number in range(50):
            lease = lend(lender, number)
            assert lease is not None
            assert lease.number == 0
            lender.give_back(lease)
        return int(lender._mpi.made)

    assert lenders(3, work) == [1, 1, 1]


def test_what_only_some_ranks_have_back_is_not_lent(lenders: Any) -> None:
    def work(rank: int, lender: NativeComms) -> list[int]:
        first = lend(lender, 0)
        assert first is not None
        if rank != 1:
            lender.give_back(first)
        second = lend(lender, 1)
        assert second is not None
        if rank == 1:
            lender.give_back(first)
        third = lend(lender, 2)
        assert third is not None
        return [second.number, third.number]

    assert lenders(3, work) == [[1, 0]] * 3


def test_other_ranks_get_another(lenders: Any) -> None:
    def work(rank: int, lender: NativeComms) -> int:
        lease = lend(lender, 0)
        assert lease is not None
        lender.give_back(lease)
        if rank < 2:
            pair = lender.lend((0, 1), 5, tag=19, timeout_s=300)
            assert pair is not None
            assert pair.number == 5
        return int(lender._mpi.made)

    assert lenders(3, work) == [2, 2, 1]


def test_nobody_gets_one_beyond_the_limit(lenders: Any) -> None:
    def work(rank: int, lender: NativeComms) -> list[bool]:
        leases = [lend(lender, number) for number in range(3)]
        assert leases[1] is not None
        lender.give_back(leases[1])
        return [each is not None for each in [*leases, lend(lender, 3)]]

    assert lenders(3, work, limit=2) == [[True, True, False, True]] * 3


def test_where_one_rank_cannot_make_one_nobody_gets_it(lenders: Any) -> None:
    def work(rank: int, lender: NativeComms) -> list[bool]:
        return [lend(lender, number) is not None for number in range(3)]

    assert lenders(3, work, available={2: 1}) == [[True, False, False]] * 3


def test_threads_that_lend_to_the_same_ranks_do_not_share(lenders: Any) -> None:
    def work(rank: int, lender: NativeComms) -> int:
        first = lend(lender, 0)
        assert first is not None
        lender.give_back(first)
        got: list[Lease | None] = []

        def one(number: int) -> None:
            got.append(lend(lender, number))

        # The other thread comes first on odd ranks.
        numbers = (1, 2) if rank % 2 else (2, 1)
        threads = [threading.Thread(target=one, args=(n,)) for n in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len({each.number for each in got if each is not None})

    assert lenders(3, work) == [2, 2, 2]


def test_a_collected_communicator_gives_back_while_another_is_lent(
    lenders: Any,
) -> None:
    """The garbage collector runs on any thread, also on one that has the lock."""

    def work(rank: int, lender: NativeComms) -> list[int]:
        first = lend(lender, 0)
        assert first is not None
        with lender._lock:
            lender.give_back(first)
        second = lend(lender, 1)
        assert second is not None
        return [second.number, lender._mpi.made]

    assert lenders(3, work) == [[0, 1]] * 3


def test_a_library_that_blocks_ends_the_call_at_its_deadline() -> None:
    mpi, may_end = FakeMpi(), threading.Event()
    mpi.Create_group = lambda group, tag: may_end.wait(300)  # type: ignore[method-assign]
    world = ThreadWorld(1)
    lender = NativeComms(mpi, world.bootstrap(0), NoMoreError, by_thread=True)
    try:
        with pytest.raises(TimeoutError_, match="one of them does not come"):
            lender.create([0], tag=17, timeout_s=0.05)
    finally:
        may_end.set()


def test_none_is_made_once_a_rank_has_failed() -> None:
    """The first time it is known before; the second time, while the library blocks."""
    mpi, may_end = FakeMpi(), threading.Event()
    made = 0

    def create(group: object, tag: int) -> object:
        nonlocal made
        made += 1
        return may_end.wait(300)

    mpi.Create_group = create  # type: ignore[method-assign]
    world, whys = ThreadWorld(1), ["rank 3 failed"]
    lender = NativeComms(
        mpi,
        world.bootstrap(0),
        NoMoreError,
        why_none=lambda: whys.pop() if whys else "",
        by_thread=True,
    )
    try:
        with pytest.raises(BackendError, match="rank 3 failed"):
            lender.create([0], tag=17, timeout_s=300)
        assert made == 0
        whys += ["rank 3 failed", ""]
        with pytest.raises(BackendError, match="rank 3 failed"):
            lender.create([0], tag=17, timeout_s=300)
        assert made == 1
    finally:
        may_end.set()


def test_ranks_are_those_of_the_mpi_communicator() -> None:
    mpi, asked = FakeMpi(), []
    mpi.Get_group().Incl = lambda ranks: asked.append(ranks) or mpi.Get_group()  # type: ignore[attr-defined, func-returns-value]
    lender = NativeComms(
        mpi, ThreadWorld(2).bootstrap(0), NoMoreError, places=[4, 1, 7]
    )
    lender.create([2, 0], tag=17, timeout_s=300)
    assert asked == [[7, 4]]
