# SPDX-License-Identifier: Apache-2.0
"""Messages of whichever rank sends one: receiving them, and looking at what waits.

The engine's receives name their source. So a receive from anyone looks whose message
waits, and receives that one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from commrt import _native
from commrt.errors import (
    PeerFailedError,
    RefusedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.group.group import Group
from commrt.vocabulary.dtypes import DTYPES
from commrt.vocabulary.limits import check_timeout, deadline_after
from commrt.vocabulary.request import Request

__all__ = ["FromAnyone", "WaitingMessage", "probe"]

T = TypeVar("T")


@dataclass(frozen=True)
class WaitingMessage:
    """A message that has come, or is announced, and that no receive has asked for."""

    source: int
    """The rank that sent it."""
    tag: int
    """Its tag."""
    nbytes: int
    """Its length in bytes."""
    dtype: str
    """The type of its elements."""


def probe(
    group: Group,
    source: int | None,
    tag: int,
    limit_s: float | None,
    *,
    what: str = "probe",
    written_tag: int | None = None,
) -> WaitingMessage | None:
    """Return a message that waits; None where none does, if there is no limit to wait.

    Args:
        group: the ranks.
        source: whose messages; None for all ranks.
        tag: of the message.
        limit_s: how long to wait for one; None: not at all.
        what: name of the call, for messages.
        written_tag: the tag as the program has it, if it is another.
    """
    first = group.rank + 1 if source is None else source
    num = group.size if source is None else 1

    def look() -> WaitingMessage | None:
        found = group.waiting_message(tag, first % group.size, num)
        rank, nbytes, code, refusal = found
        if rank < 0:
            return None
        if refusal is not None:  # it has been taken
            raise RefusedError(
                f"{what} on {group.name}, rank {group.rank}: rank {rank} has refused "
                f"its send (tag {tag}), and nothing was delivered: {refusal}"
            )
        dtype = DTYPES[code].name if code < len(DTYPES) else ""
        return WaitingMessage(rank, tag, nbytes, dtype)

    if limit_s is None:
        return _look_once(group, look)
    said = tag if written_tag is None else written_tag
    return _await(group, look, what, source, said, limit_s)


def _look_once(group: Group, look: Callable[[], T]) -> T:
    group.check_going()
    group.world.engine.step()
    return look()


def _await(
    group: Group,
    look: Callable[[], T | None],
    what: str,
    source: int | None,
    tag: int,
    limit_s: float,
) -> T:
    """Return what ``look`` finds; TimeoutError_ where it finds nothing in time."""
    deadline = deadline_after(limit_s)
    backoff = _native.Backoff(group.world.engine)
    while (found := _look_once(group, look)) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _late(group, what, source, tag, limit_s)
        if group.who_died(-1 if source is None else source):
            # All that a rank sent before its end is there by now, and counts.
            if (found := _look_once(group, look)) is not None:
                return found
            group.heed_deaths(source)
        if source is None and (end := _why_nobody_sends(group))[0]:
            # A message that it sent before it gave up is taken, too.
            if (found := _look_once(group, look)) is not None:
                return found
            why, by_death = end
            if by_death:  # so that shrink() of its origin knows it, too
                group.set_failure(why, by_death=True)
            raise (PeerFailedError if by_death else RevokedError)(
                f"{what} on {group.name}, rank {group.rank}: {why}; no message with "
                f"tag {tag} is here"
            )
        if group.is_relayed:
            backoff.rest(left_s)  # threads of this process carry the message
        else:
            backoff.pause(left_s)
    return found


def _why_nobody_sends(group: Group) -> tuple[str, bool]:
    """Return why no rank is to send any more, and whether by a death; empty: one may.

    A rank that has left by itself counts only where all others have.
    """
    why, by_death = group.known_end(later=True)
    others = (rank for rank in range(group.size) if rank != group.rank)
    if not why and group.size > 1 and all(map(group.who_died, others)):
        died = group.who_died(-1)  # one of them may have done so just now
        return died or "all other ranks have left", bool(died)
    return why, by_death


def _late(
    group: Group, what: str, source: int | None, tag: int, limit_s: float
) -> TimeoutError_:
    who = "no rank has" if source is None else f"rank {source} has not"
    return group.with_ranks(
        TimeoutError_(
            f"{what} on {group.name}, rank {group.rank}: {who} sent a message with tag "
            f"{tag} within {limit_s:g} s"
        )
    )


class FromAnyone(Request):
    """A receive from any rank. It looks for a message when it is tested or awaited."""

    def __init__(
        self,
        group: Group,
        what: str,
        receive: Callable[[int], Any],
        tag: int,
        timeout_s: float | None = None,
    ) -> None:
        """Begin to look.

        Args:
            group: whose messages.
            what: name of the call, for messages.
            receive: starts to receive from a rank; returns a request.
            tag: of the message.
            timeout_s: default limit of waits; None for the group's.
        """
        self._group = group
        self._what = what
        self._start = receive
        self._tag = tag
        self._timeout_s = group.timeout_s if timeout_s is None else timeout_s
        self._receive: Any = None
        self._source = -1
        self._lock = threading.Lock()
        _look_once(group, self._begin)

    @property
    def source(self) -> int:
        """The rank that sent it; -1 until one has."""
        return self._source

    @property
    def received_nbytes(self) -> int:
        """Bytes that have come; 0 until a rank has sent some."""
        return 0 if self._receive is None else int(self._receive.received_nbytes)

    @property
    def done(self) -> bool:
        """True if it has ended, without progress."""
        return self._receive is not None and bool(self._receive.done)

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self._what

    @property
    def timeout_s(self) -> float:
        """Default limit of its waits, in seconds."""
        return self._timeout_s

    @property
    def device(self) -> int | None:
        """Number of the device of its array, once a message has come."""
        found: int | None = getattr(self._receive, "device", None)
        return found

    def test(self) -> bool:
        """Run a little progress; True once complete."""
        if self._receive is None:
            _look_once(self._group, self._begin)
        return self._receive is not None and bool(self._receive.test())

    def wait(self, *, stream: Any = None, timeout_s: float | None = None) -> Any:
        """Return the array once a message has come.

        The host waits until one is announced, also where the array is on a device.
        """
        deadline = self._await_message(timeout_s)
        if self.device is not None:
            return self._receive.wait(stream=stream)
        if stream is not None:
            raise UsageError(
                f"{self._what}: wait(stream=...) is for device arrays; this operation "
                f"is on host memory, call wait() without a stream"
            )
        return self._receive.wait(timeout_s=max(1e-3, deadline - time.monotonic()))

    def synchronize(self, *, timeout_s: float | None = None) -> Any:
        """Block the host until the array is filled, and return it."""
        deadline = self._await_message(timeout_s)
        left_s = max(1e-3, deadline - time.monotonic())
        return self._receive.synchronize(timeout_s=left_s)

    def raise_if_late(self, limit_s: float) -> None:
        """Raise what a wait that began so long ago would raise, unless it has ended."""
        if self._receive is None and not _look_once(self._group, self._begin):
            raise _late(self._group, self._what, None, self._tag, limit_s)
        self._receive.raise_if_late(limit_s)

    def __repr__(self) -> str:
        state = "done" if self.done else "pending"
        source = "any rank" if self._receive is None else f"rank {self.source}"
        return f"<commrt.Request {self._what} from {source}, tag {self._tag}: {state}>"

    def _await_message(self, timeout_s: float | None) -> float:
        """Return when the limit is over, once a message has come."""
        limit_s = self._timeout_s
        if timeout_s is not None:
            limit_s = check_timeout(self._what, timeout_s)
        deadline = deadline_after(limit_s)
        if self._receive is None:
            try:
                _await(self._group, self._begin, self._what, None, self._tag, limit_s)
            except TimeoutError_ as error:
                error.request = self
                raise
        return deadline

    def _begin(self) -> bool | None:
        """Begin to receive if there is a message; None where there is none."""
        group = self._group
        with self._lock:  # several threads may wait for it
            if self._receive is not None:
                return True
            # Start at the next rank, so that no rank's messages always come first.
            source = group.waiting_source(self._tag, (group.rank + 1) % group.size)
            if source < 0:
                return None
            self._receive, self._source = self._start(source), source
        return True
