# SPDX-License-Identifier: Apache-2.0
"""Processes that want to become ranks of a running job meet it in its store.

A newcomer takes a ticket, says which process it is, and waits. Ranks that grow read the
tickets, and each of them writes the same invitations. The first of these counts, and a
newcomer that gives up writes in the same place: it is invited, or it has left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from commrt.bootstrap.base import poll_until
from commrt.bootstrap.survivors import SharedStore
from commrt.errors import TimeoutError_

__all__ = ["CountingStore", "Invitation", "Newcomer", "Reception", "ask_to_join"]

_PLACE = "commrt/newcomers"
_LEFT = "left"


class CountingStore(SharedStore, Protocol):
    """The part of a torch Store in which newcomers take tickets."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0; return what it is then."""
        ...


@dataclass(frozen=True)
class Newcomer:
    """One that waits."""

    ticket: int
    """Its place in the queue of all that ever came."""
    process: Mapping[str, str]
    """Says where its process can be found."""


@dataclass(frozen=True)
class Invitation:
    """Where a newcomer meets the others, and what it is there."""

    prefix: str
    """Of the keys in the store."""
    rank: int
    size: int
    words: str
    """A text from the ranks that invite, as JSON."""


class Reception:
    """The tickets of a store."""

    def __init__(self, store: CountingStore) -> None:
        self._store = store
        self._first = 1
        """All tickets before it are answered."""

    def waiting(self) -> list[Newcomer]:
        """Return those that wait; local."""
        last = int(self._store.add(f"{_PLACE}/tickets", 0))
        found = []
        for ticket in range(self._first, last + 1):
            if self._store.check([_answer(ticket)]):
                if ticket == self._first:
                    self._first += 1
            elif self._store.check([_name(ticket)]):
                text = bytes(self._store.get(_name(ticket)))
                found.append(Newcomer(ticket, json.loads(text)))
        return found

    def invited(self) -> set[str]:
        """Return the names of processes that were invited, or gave up; local."""
        last = int(self._store.add(f"{_PLACE}/tickets", 0))
        names = set()
        for ticket in range(1, last + 1):
            if self._store.check([_answer(ticket)]):
                text = bytes(self._store.get(_name(ticket)))
                names.add(str(json.loads(text)["process"]))
        return names

    def invite(self, ticket: int, invitation: Invitation) -> None:
        """Answer a ticket, unless it has been answered."""
        text = json.dumps(asdict(invitation))
        self._store.compare_set(_answer(ticket), "", text)

    def has_left(self, ticket: int) -> bool:
        """Return whether a newcomer has given up waiting."""
        if not self._store.check([_answer(ticket)]):
            return False
        return bytes(self._store.get(_answer(ticket))) == _LEFT.encode()


def ask_to_join(
    store: CountingStore, process: Mapping[str, str], timeout_s: float
) -> Invitation:
    """Wait until ranks of the job invite this process; raise TimeoutError_ if none do.

    ``process`` says where this process can be found.
    """
    ticket = int(store.add(f"{_PLACE}/tickets", 1))
    store.set(_name(ticket), json.dumps(dict(process)))

    def answered() -> bool:
        return bool(store.check([_answer(ticket)]))

    if not poll_until(answered, timeout_s):
        said = store.compare_set(_answer(ticket), "", _LEFT)
        if bytes(said) == _LEFT.encode():
            raise TimeoutError_(
                f"commrt.init: this process was started to join a running job "
                f"(COMMRT_JOIN=1), and no ranks of it called grow() within "
                f"{timeout_s:g} s"
            )
    answer = json.loads(bytes(store.get(_answer(ticket))))
    return Invitation(**answer)


def _name(ticket: int) -> str:
    return f"{_PLACE}/{ticket}/process"


def _answer(ticket: int) -> str:
    return f"{_PLACE}/{ticket}/answer"
