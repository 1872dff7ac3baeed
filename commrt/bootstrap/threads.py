# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: a shared dictionary and a condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from commrt.bootstrap.base import (
    Bootstrap,
    Keys,
    make_progress,
    timed_out,
    with_heed,
)
from commrt.bootstrap.survivors import (
    Decision,
    agree_on_survivors,
    met_by_survivors,
)
from commrt.errors import PeerFailedError
from commrt.vocabulary.limits import deadline_after

__all__ = ["ThreadWorld"]


_IDLE_S, _LONGEST_IDLE_S = 0.001, 0.02
"""Between two calls of ``idle`` while a rank waits; the longer it waits, the longer."""


class MemoryStore:
    """Values that the threads of one process share, with the methods of a Store."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the value is ``expected``, "" for none; return it."""
        with self._lock:
            before = self._values.get(key, b"")
            if before == expected.encode():
                before = self._values[key] = desired.encode()
            return before

    def delete_key(self, key: str) -> None:
        """Forget a value, if it is there."""
        with self._lock:
            self._values.pop(key, None)


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
        self._gone: dict[int, str] = {}
        self._parts: dict[str, tuple[list[int], ThreadWorld]] = {}
        self.words: dict[tuple[str, int], bytes] = {}
        """Words of ranks to whoever asks, by key and rank."""
        self.store = MemoryStore()
        """Where ranks agree on who goes on."""

    def bootstrap(self, rank: int) -> Bootstrap:
        """Return the bootstrap of one rank."""
        return _ThreadBootstrap(self, rank)

    def fail(self, rank: int, reason: str) -> None:
        """Wake every rank that waits, with PeerFailedError: ``rank`` will not come."""
        with self._changed:
            if self._failure is None:
                self._failure = f"rank {rank} failed: {reason}"
            self._changed.notify_all()
        self.end(rank, f"it failed: {reason}")
        for ranks, part in self._parts_with(rank):
            part.fail(ranks.index(rank), reason)

    def end(self, rank: int, why: str) -> None:
        """Note that a rank comes no more; the others can go on without it."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()
        for ranks, part in self._parts_with(rank):
            part.end(ranks.index(rank), why)

    def gone(self, rank: int) -> str:
        """Return why a rank comes no more; an empty text: it may come yet."""
        return self._gone.get(rank, "")

    def is_over(self) -> bool:
        """Return whether all ranks have ended."""
        return len(self._gone) == self.size

    def part(self, name: str, ranks: list[int]) -> ThreadWorld:
        """Return the world of some ranks; the same one for all that name it alike."""
        with self._changed:
            if name not in self._parts:
                made = ThreadWorld(len(ranks))
                for number, rank in enumerate(ranks):
                    if rank in self._gone:
                        made.end(number, self._gone[rank])
                self._parts[name] = ranks, made
            return self._parts[name][1]

    def _parts_with(self, rank: int) -> list[tuple[list[int], ThreadWorld]]:
        with self._changed:
            return [each for each in self._parts.values() if rank in each[0]]

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
                    ended = [m for m in members if m in self._gone and m not in here]
                    if ended:
                        if idle is not None:
                            # It may have said before why it does not come.
                            make_progress(idle, lambda: False)
                        raise PeerFailedError(
                            f"rank {rank} stopped waiting for ranks "
                            f"{', '.join(map(str, members))}: rank {ended[0]} does not "
                            f"come, because {self._gone[ended[0]]}"
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
                    make_progress(idle, lambda: mine.said is not None)
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
        self.gone: Callable[[int], str] | None = world.gone
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

    def regroup(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> tuple[Bootstrap, dict[int, bytes]]:
        def agree(number: int, left_s: float) -> Decision:
            with self._keys.turn(members, key, timeout_s) as (name, _):
                return agree_on_survivors(
                    self._world.store,
                    f"{name}/{number}",
                    members,
                    self.rank,
                    blob,
                    left_s,
                    self.gone,
                    self.idle,
                )

        def part(decision: Decision) -> Bootstrap:
            ranks, gone = list(decision.said), self.gone
            world = self._world.part(decision.token, ranks)
            made = world.bootstrap(ranks.index(self.rank))
            made.idle = self.idle
            if gone is not None:
                made.gone = lambda number: gone(ranks[number])
            return made

        return met_by_survivors(agree, part, timeout_s)

    def leave_word(self, key: str, blob: bytes) -> None:
        self._world.words[key, self.rank] = bytes(blob)

    def words(self, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
        found = {rank: self._world.words.get((key, rank)) for rank in ranks}
        return {rank: word for rank, word in found.items() if word is not None}

    def forget(self, key: str) -> None:
        pass

    def close(self) -> None:
        pass
