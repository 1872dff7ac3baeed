# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks which are threads of one process share; it needs no descriptors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import ClassVar

from commrt.bootstrap.base import Bootstrap
from commrt.errors import BackendError, PeerFailedError
from commrt.job.arena import Arena, process_arena

__all__ = ["share_by_threads"]


def share_by_threads(
    bootstrap: Bootstrap,
    members: Sequence[int],
    key: str,
    region_nbytes: int,
    timeout_s: float,
    parts: Sequence[int] = (),
) -> Arena:
    """Return one block of memory that all ``members`` use, a region for each.

    Collective over ``members``, which are threads of this process. The memory goes
    when the last of those that have it closes it. ``parts``: as of ``arena.share``.
    Raises BackendError on all of them where it cannot be had, and PeerFailedError where
    the first one has left before.
    """
    mine = b""
    arena = None
    if bootstrap.rank == members[0]:
        try:
            arena = _ThreadArena.create(len(members), region_nbytes, parts)
            mine = str(arena.number).encode()
        except (OSError, BackendError) as error:  # the others wait to hear of it
            mine = f"no: {error}".encode()
    try:
        said = bootstrap.exchange(members, key, mine, timeout_s)[0].decode()
    except BaseException:
        # The others may have heard of it all the same, and use it already.
        if arena is not None:
            arena.take_back()
        raise
    if said.startswith("no: "):
        raise BackendError(
            f"ranks {list(members)} cannot share {len(members)} x {region_nbytes} "
            f"bytes ({key}): rank {members[0]}: {said.removeprefix('no: ')}"
        )
    if arena is not None:
        return arena
    taken = _ThreadArena.take(int(said))
    if taken is None:
        if bootstrap.idle is not None:
            bootstrap.idle()  # raises the reason, where this rank can know it by now
        raise PeerFailedError(
            f"ranks {list(members)} share no memory ({key}): rank {members[0]}, whose "
            f"it is, has left again"
        )
    return taken


class _ThreadArena(Arena):
    """Memory of ranks that are threads: unmapped once each of them has closed it."""

    # The garbage collector may close another arena while this thread has it.
    _lock = threading.RLock()
    _numbers = itertools.count()
    _offered: ClassVar[dict[int, _ThreadArena]] = {}

    def __init__(
        self, address: int, members: int, region_nbytes: int, parts: Sequence[int] = ()
    ) -> None:
        super().__init__(address, members, region_nbytes)
        self.number = next(self._numbers)
        """Names it; unlike an address, no other arena ever has the same."""
        self._users = members
        self._to_come = members - 1
        self._parts = parts
        self._mapped: dict[int, _Part] = {}

    @classmethod
    def create(
        cls, members: int, region_nbytes: int, parts: Sequence[int]
    ) -> _ThreadArena:
        """Map memory for ``members`` threads, and offer it to the others."""
        plain = process_arena(members, region_nbytes)
        arena = cls(plain.address, members, plain.region_nbytes, parts)
        with cls._lock:
            if members > 1:
                cls._offered[arena.number] = arena
        return arena

    @classmethod
    def take(cls, number: int) -> _ThreadArena | None:
        """Return an arena that was offered; None where that was taken back."""
        with cls._lock:
            arena: _ThreadArena | None = cls._offered.get(number)
            if arena is not None:
                arena._to_come -= 1
                if arena._to_come == 0:
                    del cls._offered[number]
            return arena

    def part(self, number: int) -> Arena:
        """Do as ``Arena.part``; the memory is there as long as somebody may use it."""
        with self._lock:
            mapped = self._mapped.get(number)
            if mapped is None:
                try:
                    plain = process_arena(self._members, self._parts[number])
                except OSError as error:
                    raise BackendError(
                        f"memory of the ranks of this process cannot be mapped: {error}"
                    ) from error
                mapped = _Part(plain.address, self._members, plain.region_nbytes)
                self._mapped[number] = mapped
            mapped.add_user()
            return mapped

    def take_back(self) -> None:
        """Close it, also for those that have not taken it yet, and never will."""
        with self._lock:
            self._offered.pop(self.number, None)
            self._give_back(1 + self._to_come)

    def close(self) -> None:
        """Give it back; each member calls this once. The last one unmaps it."""
        with self._lock:
            self._give_back(1)

    def _give_back(self, users: int) -> None:
        self._users -= users
        if self._users == 0:
            super().close()
            for mapped in self._mapped.values():
                mapped.close()


class _Part(_ThreadArena):
    """A block behind another arena, which is a user of it: threads may still come."""

    def __init__(self, address: int, members: int, region_nbytes: int) -> None:
        super().__init__(address, members, region_nbytes)
        self._users = 1

    def add_user(self) -> None:
        """Let one more thread use it; the caller holds the lock."""
        self._users += 1
