# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: for tests, notebooks and trying out algorithms."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from commrt.bootstrap.threads import ThreadWorld
from commrt.comm import Communicator
from commrt.launch import LaunchInfo
from commrt.world import connect_world

__all__ = ["LocalRanks", "run"]

T = TypeVar("T")


def run(size: int, function: Callable[[Communicator], T], *, timeout_s: float = 60) -> list[T]:
    """Run ``function(comm)`` on ``size`` ranks that are threads; return the results.

    The first error of any rank is raised, once all threads have ended; the others are
    woken up if they wait for it.
    """
    world = ThreadWorld(size)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        try:
            results[rank] = function(_connect(world, rank, size, timeout_s))
        except BaseException as error:  # noqa: BLE001 - re-raised by the caller
            errors.append((rank, error))
            world.fail(rank, repr(error))

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 5)
    if errors:
        raise errors[0][1]
    if any(thread.is_alive() for thread in threads):
        stuck = [thread.name for thread in threads if thread.is_alive()]
        raise TimeoutError(f"{', '.join(stuck)} did not end within {timeout_s:g} s")
    return [results[rank] for rank in range(size)]


def _connect(world: ThreadWorld, rank: int, size: int, timeout_s: float) -> Communicator:
    launch = LaunchInfo("single", rank, size, "threads of one process")
    mine = connect_world(world.bootstrap(rank), launch, in_process=True)
    mine.timeout_s = timeout_s
    identity = mine.agree_id(range(size), "world")
    return Communicator(mine, range(size), "local", identity)
