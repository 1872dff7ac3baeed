# SPDX-License-Identifier: Apache-2.0
"""Communicators of MPI and groups of gloo, lent to commrt's communicators.

A library's own collectives need one of them. MPI libraries have few: MPICH ends at
about 2,045 communicators; a group of gloo has a socket for each pair of ranks. So
commrt lends one only where ranks may want the library's own collectives, lends it again
after ``free()`` to the next communicator of the same ranks, and makes only a part of
those that the library has.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commrt.bootstrap.base import Bootstrap
from commrt.errors import BackendError

__all__ = ["Lease", "Lender"]


@dataclass(frozen=True)
class Lease:
    """One lent communicator, and the ranks that may have it."""

    ranks: tuple[int, ...]
    """Ranks of the world that it spans, in its order."""
    number: int
    """Its key for the ranks: the identity of the communicator it was made for."""
    lent: Any
    """The mpi4py communicator, or the group of gloo."""


class Lender(ABC):
    """Makes what is lent, and keeps what was given back.

    Args:
        bootstrap: lets the ranks agree.
        limit: how many to make at most.
    """

    def __init__(self, bootstrap: Bootstrap, limit: int) -> None:
        self._bootstrap = bootstrap
        self._limit = limit
        self._made = 0
        self._free: dict[tuple[int, ...], dict[int, Lease]] = {}
        # Communicators that the garbage collector finds give theirs back at any moment,
        # also while this thread has the lock: they only leave them here.
        self._returned: deque[Lease] = deque()
        self._lock = threading.Lock()

    def lend(
        self, ranks: tuple[int, ...], number: int, tag: int, timeout_s: float
    ) -> Lease | None:
        """Return one over ``ranks``; None where there are, or commrt takes, no more.

        Collective over ``ranks``; every rank gets one or none does. ``number`` names a
        new one, ``tag`` is an MPI tag that nobody else uses.
        """
        # Another thread may be lending to the same ranks: what one offers is its own.
        with self._lock:
            while self._returned:
                lease = self._returned.popleft()
                self._free.setdefault(lease.ranks, {})[lease.number] = lease
            offered = self._free.pop(ranks, {})
            room = self._made < self._limit
        room = room and not self._why_none()
        try:
            mine = json.dumps([sorted(offered), room]).encode()
            said = self._exchange(ranks, f"comm{number}/lend", mine, timeout_s)
            common = set.intersection(*(set(each[0]) for each in said))
            if common:
                return offered.pop(min(common))
        finally:
            self._returned.extend(offered.values())
        if not all(each[1] for each in said):
            return None
        return self._make(ranks, number, tag, timeout_s)

    def give_back(self, lease: Lease) -> None:
        """Let the next communicator of the same ranks have it; nothing may use it."""
        self._returned.append(lease)

    def forget(self) -> None:
        """Keep nothing any more of what was given back: nobody borrows from here."""
        with self._lock:
            self._free.clear()
            self._returned.clear()

    def _why_none(self) -> str:
        """Return why the library makes none now, as far as this rank knows."""
        return ""

    @abstractmethod
    def _create(
        self, ranks: tuple[int, ...], number: int, tag: int, timeout_s: float
    ) -> Any:
        """Return a new one; collective over ``ranks``.

        Raises BackendError where there is none.
        """

    def _make(
        self, ranks: tuple[int, ...], number: int, tag: int, timeout_s: float
    ) -> Lease | None:
        try:
            created = self._create(ranks, number, tag, timeout_s)
        except BackendError:
            created = None
        with self._lock:
            self._made += created is not None
        mine = json.dumps(created is not None).encode()
        if all(self._exchange(ranks, f"comm{number}/lent", mine, timeout_s)):
            return Lease(ranks, number, created)
        return None

    def _exchange(
        self, ranks: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> list[Any]:
        said = self._bootstrap.exchange(ranks, key, blob, timeout_s)
        return [json.loads(each) for each in said]
