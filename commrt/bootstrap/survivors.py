# SPDX-License-Identifier: Apache-2.0
"""Who of some ranks goes on together, agreed in a store while any of them may die.

Each rank that goes on writes its blob. Once every member has either written or ended,
any of them proposes who takes part; the store takes the first proposal, whole, and
keeps it (``compare_set``). So all ranks read the same decision, whoever dies when.

The decision may hold a rank that has died since it wrote. Whoever meets the others next
finds that, and they agree again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from commrt.bootstrap.base import Bootstrap, poll_until
from commrt.errors import PeerFailedError, RevokedError, TimeoutError_
from commrt.vocabulary.limits import deadline_after

__all__ = [
    "Decision",
    "SharedStore",
    "agree_on_survivors",
    "check_in",
    "met_by_survivors",
    "not_all_came",
]

Peers = TypeVar("Peers", bound=Bootstrap)


class SharedStore(Protocol):
    """The part of a torch Store in which ranks agree."""

    def set(self, key: str, value: str) -> object:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the key has no value and "" is expected; return it."""
        ...

    def delete_key(self, key: str) -> object:
        """Forget a value, if it is there."""
        ...


@dataclass(frozen=True)
class Decision:
    """The ranks that go on, as all of them know it."""

    said: Mapping[int, bytes]
    """Their blobs, in members' order."""
    gone: Mapping[int, str]
    """Why the other members come no more."""
    token: str
    """Names what these ranks have together; nobody else has the same."""

    def text(self) -> str:
        """Return it as the store keeps it."""
        said = [[rank, blob.hex()] for rank, blob in self.said.items()]
        return json.dumps([said, [*self.gone.items()], self.token])

    @classmethod
    def of(cls, text: bytes) -> Decision:
        """Return the one that a text holds."""
        said, gone, token = json.loads(text)
        blobs = {rank: bytes.fromhex(blob) for rank, blob in said}
        return cls(blobs, dict(gone), token)


def agree_on_survivors(
    store: SharedStore,
    base: str,
    members: Sequence[int],
    rank: int,
    blob: bytes,
    timeout_s: float,
    gone: Callable[[int], str] | None,
    idle: Callable[[], object] | None,
) -> Decision:
    """Return who of ``members`` goes on, with their blobs; the same on all of them.

    Args:
        store: all members can reach it.
        base: begins the keys; nobody uses it for anything else.
        members: ranks, of which some may have ended; this ``rank`` is one.
        rank: the caller.
        blob: what the caller says to the others.
        timeout_s: limit of the wait.
        gone: returns why a rank comes no more, as far as this process knows.
        idle: called again and again while this waits.

    Raises TimeoutError_ that names those that neither came nor ended; then all may call
    again. Raises RevokedError where the others go on without the caller.
    """
    meeting = _Meeting(store, base, members, rank, gone)
    deadline = deadline_after(timeout_s)
    meeting.come(blob)
    if not poll_until(meeting.is_complete, deadline - time.monotonic(), idle):
        raise not_all_came(rank, members, meeting.missing(), timeout_s)
    return meeting.decide()


def met_by_survivors(
    agree: Callable[[int, float], Decision],
    part: Callable[[Decision], Peers],
    timeout_s: float,
) -> tuple[Peers, dict[int, bytes]]:
    """Return the bootstrap of those who go on and have met, and what they said.

    Args:
        agree: decides, given how often the ranks have decided before, and a limit.
        part: makes the bootstrap of the ranks of a decision.
        timeout_s: limit of the whole.
    """
    deadline = deadline_after(timeout_s)
    number = 0
    while True:
        decision = agree(number, deadline - time.monotonic())
        made = part(decision)
        left_s = max(0.0, deadline - time.monotonic())
        try:
            # All ranks alike find here that one has died since.
            made.exchange(range(made.size), "met", b"", left_s)
        except PeerFailedError:
            number += 1
            continue
        return made, {**decision.said}


def not_all_came(
    rank: int, members: Sequence[int], missing: Sequence[int], timeout_s: float
) -> TimeoutError_:
    """Return the error where ``missing`` keep the others from an agreement."""
    plural = "s" if len(missing) != 1 else ""
    return TimeoutError_(
        f"rank {rank}: rank{plural} {', '.join(map(str, missing))} neither came "
        f"nor ended within {timeout_s:g} s, so the others of {list(members)} "
        f"cannot go on without: call again, with a larger timeout_s if "
        f"{'they are' if plural else 'it is'} only late"
    )


def check_in(decision: Decision, rank: int) -> None:
    """Raise RevokedError where the others go on without ``rank``."""
    if rank in decision.said:
        return
    why = decision.gone.get(rank, "it did not come")
    raise RevokedError(
        f"the other ranks go on without rank {rank}: they found that {why}"
    )


class _Meeting:
    """One agreement of one rank."""

    def __init__(
        self,
        store: SharedStore,
        base: str,
        members: Sequence[int],
        rank: int,
        gone: Callable[[int], str] | None,
    ) -> None:
        self._store, self._rank, self._members = store, rank, list(members)
        self._ask = gone
        self._blobs = {member: f"{base}/said/{member}" for member in members}
        self._notices = {member: f"{base}/gone/{member}" for member in members}
        self._decision = f"{base}/decision"
        self._read = {member: f"{base}/read/{member}" for member in members}
        self._came: set[int] = set()
        self._gone: dict[int, str] = {}

    def come(self, blob: bytes) -> None:
        """Say that this rank goes on."""
        if not self._is_decided():
            self._store.set(self._blobs[self._rank], blob.hex())

    def is_complete(self) -> bool:
        """Return whether each member has come or ended, or the ranks have decided."""
        if self._is_decided():
            return True
        for member in self.missing():
            if self._has(self._blobs[member]):
                self._came.add(member)
            elif self._has(self._notices[member]):
                notice = self._store.get(self._notices[member])
                self._gone[member] = bytes(notice).decode()
            elif self._ask is not None and (why := self._ask(member)):
                # Ranks of other nodes may not see it.
                self._store.set(self._notices[member], why)
                self._gone[member] = why
        return not self.missing()

    def missing(self) -> list[int]:
        """Return the members that have neither come nor ended, as far as is known."""
        known = self._came | self._gone.keys()
        return [member for member in self._members if member not in known]

    def decide(self) -> Decision:
        """Propose who goes on; return the proposal that came first."""
        if self._is_decided():
            found = self._store.get(self._decision)
        else:
            ask = self._ask or (lambda _: "")
            for member in sorted(self._came - {self._rank}):
                if why := ask(member):  # it died after it came
                    self._came.discard(member)
                    self._gone[member] = why
            said = {
                member: bytes.fromhex(
                    bytes(self._store.get(self._blobs[member])).decode()
                )
                for member in self._members
                if member in self._came
            }
            mine = Decision(said, self._gone, secrets.token_hex(8))
            found = self._store.compare_set(self._decision, "", mine.text())
        decision = Decision.of(bytes(found))
        check_in(decision, self._rank)
        self._store.set(self._read[self._rank], "1")
        if self._store.check([self._read[member] for member in decision.said]):
            self._forget()
            if not decision.gone:  # nobody looks for it any more
                self._store.delete_key(self._decision)
        return decision

    def _forget(self) -> None:
        """Delete what led to the decision, which every rank that goes on has read."""
        for keys in (self._blobs, self._notices, self._read):
            for key in keys.values():
                self._store.delete_key(key)

    def _is_decided(self) -> bool:
        return self._has(self._decision)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))
