# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: for tests, notebooks and trying out algorithms."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from commrt import _native
from commrt.bootstrap.threads import ThreadWorld
from commrt.comm import Communicator
from commrt.core import Core
from commrt.errors import TimeoutError_, UsageError, shown
from commrt.launch.detect import LaunchInfo
from commrt.runtime import open_world
from commrt.vocabulary.checks import as_integer
from commrt.vocabulary.limits import check_timeout, deadline_after

__all__ = ["LocalRanks", "run"]

T = TypeVar("T")
_MOST_RANKS = 4096
"""More threads than a process may have, as a rule."""
_LOOK_S = 0.01
"""Seconds between looks whether the other ranks have ended."""


def run(
    size: int, function: Callable[[Communicator], T], *, timeout_s: float = 60
) -> list[T]:
    """Run ``function(comm)`` on ``size`` ranks that are threads; return the results.

    The first error of any rank is raised, once all threads have ended; the others are
    woken up if they wait for it. Communicators are freed at the end, unless something
    is in flight on them. Raises TimeoutError_ if a thread is still running 5 seconds
    after ``timeout_s``.
    """
    world = _world_of("local.run", size)
    timeout_s = check_timeout("local.run", timeout_s)
    if not callable(function):
        raise UsageError(
            f"local.run: function={shown(function)} must be a function that takes a "
            f"communicator"
        )

    def main(rank: int) -> T:
        core = _connect(world, rank, size, timeout_s)
        engines[rank] = core.world.engine
        try:
            result = function(Communicator(core))
        except BaseException as error:
            # Those who wait for this rank in an operation need not wait for ever.
            if core.closed is None:
                core.recovery.end(f"rank {rank} failed: {error!r}")
            raise
        if core.idle:
            core.free()
        world.end(rank, "its function has returned")
        return result

    engines: dict[int, Any] = {}
    return _on_threads(world, main, timeout_s, engines)


class LocalRanks:
    """All ranks of a communicator in the hands of one thread, for deterministic tests.

    Start nonblocking operations on each of ``comms``, then ``step(rank)`` the ranks in
    any order: nothing happens in between. A blocking call would wait for ever for ranks
    that its own thread has yet to run.
    """

    def __init__(self, size: int, *, timeout_s: float = 60) -> None:
        self._world = _world_of("LocalRanks", size)
        self._timeout_s = timeout_s = check_timeout("LocalRanks", timeout_s)
        self._cores = _on_threads(
            self._world,
            lambda rank: _connect(self._world, rank, size, timeout_s),
            timeout_s,
            {},
        )
        self.comms: list[Communicator] = [*map(Communicator, self._cores)]

    def step(self, rank: int) -> bool:
        """Run one pass over what is in flight on ``rank``; True if it advanced."""
        return bool(self._cores[rank].world.engine.step())

    def each(self, function: Callable[[Communicator], T]) -> list[T]:
        """Run ``function(comm)`` for all ranks at once, for calls that exchange."""
        return _on_threads(
            self._world, lambda rank: function(self.comms[rank]), self._timeout_s, {}
        )

    def free(self) -> None:
        """Free the communicators."""
        for comm in self.comms:
            comm.free()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()


def _world_of(what: str, size: int) -> ThreadWorld:
    number = as_integer(size)
    if number is None or not 1 <= number <= _MOST_RANKS:
        raise UsageError(
            f"{what}: size={shown(size)} must be a number of ranks, an integer in "
            f"1..{_MOST_RANKS}"
        )
    return ThreadWorld(number)


def _on_threads(
    world: ThreadWorld,
    function: Callable[[int], T],
    timeout_s: float,
    engines: Mapping[int, Any],
) -> list[T]:
    """Return what a function returns for each rank, on a thread of its own.

    ``engines`` are those of the ranks that have connected.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001 - re-raised by the caller
            errors.append(error)
            world.fail(rank, repr(error))
            if rank in engines:
                _serve(world, engines[rank], deadline)

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(world.size)
    ]
    deadline = deadline_after(timeout_s + 5)
    for thread in threads:
        thread.start()
    for thread in threads:
        left_s = deadline - time.monotonic()
        thread.join(min(max(0.0, left_s), threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        raise TimeoutError_(
            f"{', '.join(stuck)} did not end within {timeout_s:g} s: look at what "
            f"these threads wait for, or pass a larger timeout_s"
        )
    return [results[rank] for rank in range(world.size)]


def _serve(world: ThreadWorld, engine: Any, deadline: float) -> None:
    """Answer messages of a rank that has failed, until the others have ended.

    They may have begun to take some, and would wait for the rest. A process that ends
    tells them by that; a thread does not.
    """
    backoff = _native.Backoff(engine)
    while not world.is_over() and (left_s := deadline - time.monotonic()) > 0:
        if not engine.step():
            backoff.pause(min(left_s, _LOOK_S))


def _connect(world: ThreadWorld, rank: int, size: int, timeout_s: float) -> Core:
    launch = LaunchInfo("single", rank, size, "threads of one process")
    mine = open_world(world.bootstrap(rank), launch, in_process=True)
    mine.timeout_s = timeout_s
    identity = mine.agree_id(range(size), "world")
    return Core(mine, range(size), "local", identity)
