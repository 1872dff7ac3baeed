# SPDX-License-Identifier: Apache-2.0
"""Memory of ranks that are threads: it is there as long as one of them uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from commrt.bootstrap import ThreadWorld
from commrt.errors import PeerFailedError, RevokedError
from commrt.job.arena import Arena
from commrt.job.thread_memory import share_by_threads


def _raise(reason: Exception) -> None:
    raise reason


def _is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [tuple(int(n, 16) for n in line.split()[0].split("-")) for line in lines]
    return any(first <= address < last for first, last in bounds)


class Peers:
    """A rank's bootstrap; something happens when an exchange has ended."""

    def __init__(self, world: ThreadWorld, rank: int, then: Callable[[], object]):
        self.rank, self._then = rank, then
        self.idle: Callable[[], object] | None = None
        self._peers = world.bootstrap(rank)

    def exchange(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> list[bytes]:
        """Exchange as ever."""
        said = self._peers.exchange(members, key, blob, timeout_s)
        self._then()
        return said


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_last_thread_gives_the_memory_back(size: int, run_threads) -> None:
    world, written = ThreadWorld(size), threading.Barrier(size)

    def rank_main(rank: int) -> int:
        shared = share_by_threads(world.bootstrap(rank), range(size), "k", 100, 240)
        view = shared.view()
        view[rank * shared.region_nbytes] = rank + 1
        written.wait(240)
        assert [view[r * shared.region_nbytes] for r in range(size)] == [
            rank + 1 for rank in range(size)
        ]
        address = shared.address
        assert _is_mapped(address)
        written.wait(240)
        shared.close()
        return address

    addresses = run_threads(size, rank_main)
    assert len({*addresses}) == 1
    assert not _is_mapped(addresses[0])


def test_a_rank_may_close_it_before_the_others_have_it(run_threads) -> None:
    world, is_closed = ThreadWorld(3), threading.Event()

    def rank_main(rank: int) -> int:
        late = Peers(world, rank, lambda: rank == 0 or is_closed.wait(240))
        shared = share_by_threads(late, range(3), "k", 1, 240)  # type: ignore[arg-type]
        address = shared.address
        assert _is_mapped(address)
        shared.close()
        if rank == 0:
            is_closed.set()
        return address

    addresses = run_threads(3, rank_main)
    assert len({*addresses}) == 1
    assert not _is_mapped(addresses[0])


def test_memory_of_a_rank_that_is_interrupted_stays_for_those_who_have_it(
    run_threads,
) -> None:
    world = ThreadWorld(3)
    have_it, has_left = threading.Barrier(3), threading.Event()

    def interrupt() -> None:
        have_it.wait(240)  # the others have heard of it, and have taken it
        raise KeyboardInterrupt

    def rank_main(rank: int) -> int:
        if rank == 0:
            peers = Peers(world, 0, interrupt)
            with pytest.raises(KeyboardInterrupt):
                share_by_threads(peers, range(3), "k", 1, 240)  # type: ignore[arg-type]
            has_left.set()
            return 0
        shared = share_by_threads(world.bootstrap(rank), range(3), "k", 1, 240)
        have_it.wait(240)
        assert has_left.wait(240)
        address = shared.address
        assert _is_mapped(address)
        shared.view()[rank * shared.region_nbytes] = rank
        shared.close()
        return address

    _, one, other = run_threads(3, rank_main)
    assert one == other
    assert not _is_mapped(one)


@pytest.mark.parametrize("reason", [None, RevokedError("rank 0 has found damage")])
def test_memory_that_its_owner_has_left_is_not_taken(
    reason: Exception | None, run_threads
) -> None:
    world, has_left = ThreadWorld(2), threading.Event()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def rank_main(rank: int) -> None:
        if rank == 0:
            peers = Peers(world, 0, interrupt)
            with pytest.raises(KeyboardInterrupt):
                share_by_threads(peers, range(2), "k", 1, 240)  # type: ignore[arg-type]
            has_left.set()
            return
        late = Peers(world, 1, lambda: has_left.wait(240))
        if reason is not None:
            late.idle = partial(_raise, reason)
        expected = PeerFailedError if reason is None else type(reason)
        with pytest.raises(expected, match=r"rank 0.* has (left|found damage)"):
            share_by_threads(late, range(2), "k", 1, 240)  # type: ignore[arg-type]

    run_threads(2, rank_main)


def test_parts_are_there_as_long_as_a_thread_may_use_them(run_threads) -> None:
    world, all_have_it = ThreadWorld(3), threading.Barrier(2)
    has_left, has_seen = threading.Event(), threading.Event()

    def rank_main(rank: int) -> list[int]:
        shared = share_by_threads(
            world.bootstrap(rank), range(3), "k", 1, 240, [1, 70_000]
        )
        if rank == 2:  # it never uses the second part
            shared.close()
            return []
        part = shared.part(1)
        part.view()[rank * part.region_nbytes] = rank + 1
        all_have_it.wait(240)
        return _leave(rank, shared, part)

    def _leave(rank: int, shared: Arena, part: Arena) -> list[int]:
        if rank == 0:
            shared.close()
            part.close()
            has_left.set()
            assert has_seen.wait(240)
            return [part.address]
        assert has_left.wait(240)
        shared.close()
        assert [part.view()[r * part.region_nbytes] for r in range(2)] == [1, 2]
        address = part.address
        part.close()
        has_seen.set()
        return [address]

    one, other, _ = run_threads(3, rank_main)
    assert len(one) == len(other) == 1
    assert not _is_mapped(other[0])
