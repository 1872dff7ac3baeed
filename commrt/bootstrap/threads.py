# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: a shared dictionary and a condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from commrt.bootstrap.base import Bootstrap, Keys, timed_out, with_heed
from commrt.errors import PeerFailedError
from commrt.vocabulary.limits import deadline_after

__all__ = ["ThreadWorld"]


_IDLE_S, _LONGEST_IDLE_S = 0.001, 0.02
"""Between two calls of ``idle`` while a rank waits; the longer it waits, the longer."""


@dataclass
class _Waiting:
    """One rank that is in an exchange."""

    blob: bytes
    said: list[bytes] | None = None
    """Blobs of all members; None until all of them have come."""
    gave_up: set[int] = field(default_factory=set)
    """Ranks that came and left meanwhile."""


class ThreadWorld:
    """The ranks of one process; ``bootstrap(rank)`` is what one thread uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._waiting: dict[str, dict[int, _Waiting]] = {}
        self._failure: str | None = None

    def bootstrap(self, rank: int) -> Bootstrap:
        """Return the bootstrap of one rank."""
        return _ThreadBootstrap(self, rank)

    def fail(self, rank: int, reason: str) -> None:
        """Wake every rank that waits, with PeerFailedError: ``rank`` will not come."""
        with self._changed:
            if self._failure is None:
                self._failure = f"rank {rank} failed: {reason}"
            self._changed.notify_all()

    def meet(
        self,
        name: str,
        rank: int,
        members: Sequence[int],
        blob: bytes,
        timeout_s: float,
        idle: Callable[[], object] | None = None,
    ) -> tuple[list[bytes], list[int]]:
        """Exchange with all members; return the blobs, or who is missing."""
        deadline = deadline_after(timeout_s)
        with self._changed:
            here = self._waiting.setdefault(name, {})
            mine = here[rank] = _Waiting(blob)
            if len(here) == len(members):
                said = [here[member].blob for member in members]
                for each in here.values():
                    each.said = said
                del self._waiting[name]
                self._changed.notify_all()
            try:
                while mine.said is None:
                    if self._failure is not None:
                        raise PeerFailedError(
                            f"rank {rank} stopped waiting for ranks "
                            f"{', '.join(map(str, members))}, which must all come: "
                            f"{self._failure}. Correct that error and start all ranks "
                            f"again"
                        )
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        absent = [member for member in members if member not in here]
                        never = [r for r in absent if r not in mine.gave_up]
                        return [], never or absent
                    if idle is None:
                        self._changed.wait(left_s)
                        continue
                    waited_s = timeout_s - left_s
                    idle_s = min(max(_IDLE_S, waited_s / 50), _LONGEST_IDLE_S)
                    self._changed.wait(min(left_s, idle_s))
                    idle()
                return mine.said, []
            finally:
                if mine.said is None:
                    del here[rank]
                    for each in here.values():
                        each.gave_up.add(rank)
                    if not here:
                        del self._waiting[name]


class _ThreadBootstrap:
    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self._world = world
        self.idle: Callable[[], object] | None = None
        self.gone: Callable[[int], str] | None = None
        self._keys = Keys(rank, world.size)

    def exchange(
        self,
        members: Sequence[int],
        key: str,
        blob: bytes,
        timeout_s: float,
        heed: Callable[[], object] | None = None,
    ) -> list[bytes]:
        idle = with_heed(self.idle, heed)
        with self._keys.turn(members, key, timeout_s) as (name, left_s):
            blobs, missing = self._world.meet(
                name, self.rank, members, bytes(blob), left_s, idle
            )
        if missing:
            raise timed_out(self.rank, members, key, missing, timeout_s)
        return blobs

    def forget(self, key: str) -> None:
        pass

    def close(self) -> None:
        pass
