# SPDX-License-Identifier: Apache-2.0
"""One reconfiguration of a group: its ranks meet in the store under a fresh uuid.

A uuid is used up by the first attempt, whether that succeeds or not. So each rank notes
in the store that it came, all compare whom they expect, and the first rank that gives
up says so: who waits, or comes later, raises the same error at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from commrt.bootstrap.base import with_heed
from commrt.bootstrap.store import StoreBootstrap
from commrt.errors import (
    BackendError,
    CommError,
    MismatchError,
    PeerFailedError,
    RefusedError,
    TimeoutError_,
    UsageError,
)
from commrt.job.liveness import why_ended
from commrt.torch.handles import Handle

__all__ = ["Generation", "agreed_job", "reaching"]

_DONE = "done"
_AGAIN = "let all ranks call again with a fresh uuid"
_KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind for kind in (TimeoutError_, PeerFailedError, MismatchError)
}
"""Errors of one rank that are the same error on the others."""


@contextmanager
def reaching(what: str) -> Any:
    """Make errors of torch's store BackendErrors that say ``what`` was tried."""
    try:
        yield
    except CommError:
        raise
    except dist.DistError as error:
        raise BackendError(
            f"{what}: the store in which the ranks meet cannot be reached "
            f"({type(error).__name__}: {str(error).splitlines()[0]}): it ends with the "
            f"process that hosts it; torchrun's agent, or a process that lives as "
            f"long as the job, is the right one"
        ) from error


def agreed_job(store: Any, proposed: str) -> str:
    """Return the name of a group's job, which the first of its ranks proposes."""
    found: bytes = store.compare_set("commrt/job", "", proposed)
    return bytes(found).decode()


class _Meeting(StoreBootstrap):
    """A bootstrap whose exchanges end once a rank has given up."""

    heed: Callable[[], object] | None = None

    def exchange(
        self,
        members: Sequence[int],
        key: str,
        blob: bytes,
        timeout_s: float,
        heed: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Give ``blob`` to all members; return everybody's, in members' order."""
        both = with_heed(self.heed, heed)
        return super().exchange(members, key, blob, timeout_s, both)


class Generation:
    """One attempt to connect some members of a group, on one of them."""

    def __init__(
        self, store: Any, uuid: int, own: Handle, members: Sequence[Handle] = ()
    ) -> None:
        self.uuid, self.members = uuid, list(members)
        self._store, self._own = store, own
        self._base = f"commrt/reconfigure/{uuid}"
        self._over = f"{self._base}/over"
        self._is_claimed = False
        self.meeting: _Meeting | None = None

    @property
    def rank(self) -> int:
        """This member's new rank."""
        return self.members.index(self._own)

    def claim(self) -> None:
        """Take the uuid; UsageError where it was used, MismatchError if others differ.

        Of this attempt, other ranks may have been here before. Who comes to it only
        once one of them has given up raises what they raise.
        """
        store, uuid = self._store, self.uuid
        is_first = store.add(f"{self._base}/came/{self._own.member}", 1) == 1
        if store.check([self._over]):
            ended = _Ended.of(store.get(self._over))
            if is_first and ended.kind != _DONE:
                raise ended.error(uuid)
            raise self._used(ended.why)
        if not is_first:
            raise self._used("this rank has called with it before")
        self._is_claimed = True
        order = "\n".join(member.text() for member in self.members)
        digest = hashlib.blake2b(order.encode(), digest_size=8).hexdigest()
        places = ", ".join(str(member.place) for member in self.members)
        mine = json.dumps([digest, places, self._own.name])
        theirs = bytes(store.compare_set(f"{self._base}/order", "", mine)).decode()
        if json.loads(theirs)[0] != digest:
            _, others, who = json.loads(theirs)
            raise MismatchError(
                f"reconfigure: the ranks that call with uuid {uuid} pass different "
                f"handles: {who} passes those of the ranks {others} at the start, and "
                f"{self._own.name} those of {places}; let all pass the same, in the "
                f"same order, and each set of ranks have a uuid of its own"
            )

    def _used(self, why: str) -> UsageError:
        return UsageError(
            f"reconfigure: uuid {self.uuid} was already used ({why}); {_AGAIN}"
        )

    def meet(
        self, facts: bytes, limit_s: float, idle: Callable[[], object] | None
    ) -> list[bytes]:
        """Wait until all members are here; return the facts of each.

        ``idle`` is called meanwhile: ranks of other groups may wait for this one.
        """
        size = len(self.members)
        meeting = _Meeting(self._store, self.rank, size, f"{self._base}/meet")
        meeting.heed, meeting.idle = self.check, idle
        mine = self._own.known()
        known = [member.known() for member in self.members]
        meeting.gone = lambda rank: why_ended(known[rank], mine)
        self.meeting = meeting
        return meeting.exchange(range(size), "reconfigure", facts, limit_s)

    def conclude(self, limit_s: float) -> None:
        """Return once all members have made what they meet for; from then on it is."""
        meeting = self.meeting
        assert meeting is not None
        meeting.exchange(range(meeting.size), "made", b"", limit_s)
        meeting.heed = None
        if self.rank == 0:
            ended = _Ended(_DONE, f"it connected {meeting.size} ranks")
            self._store.compare_set(self._over, "", ended.text())

    def conclude_alone(self) -> None:
        """End the attempt of a member that nobody else has to meet."""
        ended = _Ended(_DONE, "it connected 1 rank")
        self._store.compare_set(self._over, "", ended.text())

    def check(self) -> None:
        """Raise what a member has given up with."""
        if self._store.check([self._over]):
            ended = _Ended.of(self._store.get(self._over))
            if ended.kind != _DONE:
                raise ended.error(self.uuid)

    def give_up(self, error: BaseException) -> None:
        """Tell the members of an error here, unless they know, or the uuid is old."""
        if not self._is_claimed:
            return
        kind = type(error).__name__
        ended = _Ended(kind, f"{self._own.name}: {str(error) or kind}")
        self._store.compare_set(self._over, "", ended.text())

    def refuse(self, error: UsageError) -> None:
        """Tell the members that this one's call was refused."""
        ended = _Ended(RefusedError.__name__, f"{self._own.name}: {error}")
        self._store.compare_set(self._over, "", ended.text())


class _Ended:
    """How an attempt has ended, as the store has it."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind, self.why = kind, why

    def text(self) -> str:
        return json.dumps([self.kind, self.why])

    @classmethod
    def of(cls, text: bytes) -> _Ended:
        return cls(*json.loads(bytes(text)))

    def error(self, uuid: int) -> CommError:
        """Return the error of the other members."""
        if self.kind == RefusedError.__name__:
            return RefusedError(
                f"reconfigure: a rank's call with uuid {uuid} was refused, so that "
                f"none is connected: {self.why}; {_AGAIN}"
            )
        kind = _KINDS.get(self.kind, BackendError)
        return kind(
            f"reconfigure: a rank has given up, so that none is connected by uuid "
            f"{uuid}: {self.why}; {_AGAIN}"
        )
