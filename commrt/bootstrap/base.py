# SPDX-License-Identifier: Apache-2.0
"""The interface of every bootstrap, and the parts that all of them share."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from commrt.errors import (
    IntegrityError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.vocabulary.limits import deadline_after

__all__ = [
    "ENDS",
    "Bootstrap",
    "ByExchange",
    "Identities",
    "Keys",
    "VainWaitError",
    "check_alive",
    "first_word",
    "make_progress",
    "poll_until",
    "timed_out",
    "with_heed",
]

T = TypeVar("T")

ENDS = (PeerFailedError, RevokedError, IntegrityError)
"""Errors of a communicator that has ended: every later wait raises them again."""
_YIELDS = 50
"""Polls that only yield the core, before polling begins to sleep."""
_SOON_S = 0.002
"""Longest sleep at first; then it is as long as a certain part of the time waited."""
_PART = 1 / 50
_LONGEST_S = 0.5
"""Longest sleep at all: so soon it is seen that a rank has ended."""


class VainWaitError(Exception):
    """A rank need not wait for others, unless they have come meanwhile.

    A check in a wait (``heed``) raises it. Its ``why`` is called where they have not,
    and returns what the wait raises. So it may count the call as one that was refused.
    """

    def __init__(self, why: Callable[[], Exception]) -> None:
        super().__init__("others do not come")
        self.why = why


class Bootstrap(Protocol):
    """Lets the ranks of one job exchange small blobs."""

    rank: int
    """This process's rank in the job."""
    size: int
    """Ranks in the job."""
    idle: Callable[[], object] | None
    """Called again and again while an exchange waits: the engine's progress, so that
    a rank that waits here still serves what it has in flight."""
    gone: Callable[[int], str] | None
    """Returns why a rank comes no more, or an empty text: it may come yet."""

    def exchange(
        self,
        members: Sequence[int],
        key: str,
        blob: bytes,
        timeout_s: float,
        heed: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Give ``blob`` to all members; return everybody's, in members' order.

        Collective over ``members`` (ranks of the job, this one among them, in the
        same order everywhere) and nobody else. Exchanges under different keys may
        run at the same time. Ctrl-C is noticed at once: nothing blocks in C.

        ``heed`` is called beside ``idle``, for this exchange. What it raises makes this
        rank give up; by VainWaitError only where the others have not come meanwhile.

        Raises TimeoutError_ naming exactly the members that did not arrive, and
        PeerFailedError at once where ``gone`` says that one cannot. A rank that gives
        up, by these or by Ctrl-C, takes back what it said, and nobody uses it any more:
        whoever waits goes on waiting, and meets it when it comes again. Ranks that
        never came need not make up for anything. Between processes that give up while
        others complete it, these may go on as if it had not; all meet again in
        the next exchange.
        """
        ...

    def regroup(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> tuple[Bootstrap, dict[int, bytes]]:
        """Return the bootstrap of the ``members`` that still live, and their blobs.

        Called by each of ``members`` (ranks of the job) that goes on. All that return
        have the same blobs, by rank and in members' order: of those that came, and
        without those that ``gone`` knows to have ended. The new bootstrap has these
        ranks, numbered in that order. Ranks may die meanwhile. A ``key`` is used once.

        Raises TimeoutError_ that names those that neither came nor ended; then all may
        call again. Raises RevokedError where the others go on without this rank.
        """
        ...

    def leave_word(self, key: str, blob: bytes) -> None:
        """Let the other ranks read ``blob`` under a key; local, and waits for nobody.

        It replaces what this rank said there before.
        """
        ...

    def words(self, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the last words that ranks have left under a key; local."""
        ...

    def forget(self, key: str) -> None:
        """Drop what is kept of exchanges that no rank makes any more.

        Of those under ``key``, and of those whose keys begin with it and a slash. May
        be called at any moment, by the garbage collector, too.
        """
        ...

    def close(self) -> None:
        """Release what the bootstrap holds; every exchange must have ended."""
        ...


class Keys:
    """Names the exchanges of one rank, each of which one thread is in at a time."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._changed = threading.Condition()
        self._busy: set[str] = set()

    @contextmanager
    def turn(
        self, members: Sequence[int], key: str, timeout_s: float
    ) -> Iterator[tuple[str, float]]:
        """Check ``members``; give the exchange's name, and the time that is left.

        Waits for another thread of this rank that is in an exchange of that name.
        """
        if len(set(members)) != len(members) or self._rank not in members:
            raise UsageError(
                f"members {list(members)} must be distinct ranks and hold this "
                f"process's rank {self._rank}"
            )
        if min(members) < 0 or max(members) >= self._size:
            raise UsageError(
                f"members {list(members)} must be ranks of the job, in "
                f"0..{self._size - 1}"
            )
        digest = hashlib.blake2b(repr(tuple(members)).encode(), digest_size=6)
        name = f"{key}@{digest.hexdigest()}"
        deadline = deadline_after(timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: name not in self._busy, timeout_s):
                raise TimeoutError_(
                    f"rank {self._rank}: another thread was in the exchange {key!r} of "
                    f"ranks {list(members)} for {timeout_s:g} s: it waits for one of "
                    f"them. Look for an error or an early exit there."
                )
            self._busy.add(name)
        try:
            yield name, max(0.0, deadline - time.monotonic())
        finally:
            with self._changed:
                self._busy.discard(name)
                self._changed.notify_all()


class Identities:
    """Numbers of communicators whose messages share a carrier."""

    def __init__(self) -> None:
        self.next = 0
        """The next one that no communicator of this rank has."""


class ByExchange(Generic[T]):
    """What a rank keeps of its exchanges, by their names, until they are forgotten."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._kept: dict[str, dict[str, T]] = {}

    def of(self, name: str) -> T:
        """Return what is kept of an exchange; of a first one, what ``make`` returns."""
        beside = self._kept.setdefault(name.partition("/")[0], {})
        found = beside.get(name)
        return beside.setdefault(name, self._make()) if found is None else found

    def forget(self, key: str) -> None:
        """Drop what is kept, as ``Bootstrap.forget`` has it."""
        first, _, rest = key.partition("/")
        if not rest:
            self._kept.pop(first, None)
            return
        beside = self._kept.get(first, {})
        for name in [*beside]:
            if name.rpartition("@")[0] == key or name.startswith(f"{key}/"):
                beside.pop(name, None)

    def __len__(self) -> int:
        return sum(map(len, [*self._kept.values()]))


def poll_until(
    done: Callable[[], bool],
    timeout_s: float,
    idle: Callable[[], object] | None = None,
) -> bool:
    """Call ``done`` until it returns True; return False once the time is up.

    Yields the core first and then sleeps for longer and longer, so that other ranks on
    the same core get on. Signals are handled at once, and a rank of this node that
    wants something of the engine meanwhile wakes it.
    """
    from commrt import _native  # torch imports this module to register, without it

    begun = time.monotonic()
    deadline = deadline_after(timeout_s)
    polls = 0
    sleep_s = 1e-5
    backoff = _native.Backoff()
    while not done():
        now = time.monotonic()
        if now >= deadline:
            return False
        if idle is not None and make_progress(idle, done):
            return True
        polls += 1
        if polls <= _YIELDS:
            time.sleep(0)
        else:
            backoff.rest(min(sleep_s, deadline - now))
            longest_s = min(max(_SOON_S, (now - begun) * _PART), _LONGEST_S)
            sleep_s = min(2 * sleep_s, longest_s)
    return True


def make_progress(idle: Callable[[], object], done: Callable[[], bool]) -> bool:
    """Call ``idle`` in a wait; raise what it raises, unless all is ``done`` by then.

    Return True where that was asked, and it is: the others came just before.
    """
    try:
        idle()
    except ENDS:
        if not done():
            raise
    except VainWaitError as error:
        if not done():
            raise error.why() from None
    else:
        return False
    return True


def with_heed(
    idle: Callable[[], object] | None, heed: Callable[[], object] | None
) -> Callable[[], object] | None:
    """Return what calls both while an exchange waits; None where there is neither."""
    if idle is None or heed is None:
        return idle or heed

    def call_both() -> None:
        idle()
        heed()

    return call_both


def first_word(*askers: Callable[[int], str] | None) -> Callable[[int], str]:
    """Return what asks one after the other why a rank is gone, until one knows."""
    known = [ask for ask in askers if ask is not None]
    return lambda rank: next(filter(None, (ask(rank) for ask in known)), "")


def check_alive(
    gone: Callable[[int], str] | None,
    key: str,
    members: Sequence[int],
    came: Callable[[int], bool],
) -> Callable[[], None] | None:
    """Return what raises PeerFailedError where a member that has not come is gone."""
    if gone is None:
        return None

    def check() -> None:
        whys = {member: gone(member) for member in members}
        missing = [one for one, why in whys.items() if why and not came(one)]
        if missing:
            # Of one that has died, if there is: others may leave because of that.
            named = min(missing, key=lambda one: whys[one].endswith("has left"))
            raise PeerFailedError(
                f"the exchange {key!r} of ranks {list(members)}: rank {named} "
                f"does not arrive, because {whys[named]}"
            )

    return check


def timed_out(
    rank: int,
    members: Sequence[int],
    key: str,
    missing: Sequence[int],
    timeout_s: float,
) -> TimeoutError_:
    """Return the error for an exchange in which ``missing`` did not arrive."""
    plural = "s" if len(missing) != 1 else ""
    names = ", ".join(map(str, missing))
    return TimeoutError_(
        f"rank {rank}: rank{plural} {names} did not arrive at the exchange {key!r} "
        f"of ranks {list(members)} within {timeout_s:g} s. Look for an error or an "
        f"early exit on the missing rank{plural}; if they are only slow, raise "
        f"timeout_s or COMMRT_TIMEOUT_S."
    )
