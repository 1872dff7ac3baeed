# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: a shared dictionary and a condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from commrt.bootstrap.base import Bootstrap, Keys, timed_out
from commrt.errors import PeerFailedError

__all__ = ["ThreadWorld"]


_IDLE_S = 0.001
"""Between two calls of ``idle`` while a rank waits."""


class ThreadWorld:
    """The ranks of one process; ``bootstrap(rank)`` is what one thread uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._blobs: dict[tuple[str, int], bytes] = {}
        self._readers: dict[str, int] = {}
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
        key: str,
        rank: int,
        members: Sequence[int],
        blob: bytes,
        timeout_s: float,
        idle: Callable[[], object] | None = None,
    ) -> tuple[list[bytes], list[int]]:
        """Exchange under a key used once; return the blobs, or who is missing."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._blobs[key, rank] = blob
            self._changed.notify_all()
            while missing := [r for r in members if (key, r) not in self._blobs]:
                if self._failure is not None:
                    raise PeerFailedError(
                        f"rank {rank} stopped waiting: {self._failure}"
                    )
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return [], missing
                if idle is None:
                    self._changed.wait(left_s)
                    continue
                self._changed.wait(min(left_s, _IDLE_S))
                idle()
            blobs = [self._blobs[key, r] for r in members]
            self._forget(key, members)
        return blobs, []

    def _forget(self, key: str, members: Sequence[int]) -> None:
        """Count one reader; the last one frees the blobs."""
        readers = self._readers.get(key, 0) + 1
        self._readers[key] = readers
        if readers == len(members):
            del self._readers[key]
            for member in members:
                del self._blobs[key, member]


class _ThreadBootstrap:
    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self._world = world
        self.idle: Callable[[], object] | None = None
        self._keys = Keys(rank, world.size)

    def exchange(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> list[bytes]:
        wire_key = self._keys.unique(members, key)
        blobs, missing = self._world.meet(
            wire_key, self.rank, members, bytes(blob), timeout_s, self.idle
        )
        if missing:
            raise timed_out(self.rank, members, key, missing, timeout_s)
        return blobs

    def close(self) -> None:
        pass
