# SPDX-License-Identifier: Apache-2.0
"""Who of some ranks goes on together, agreed by messages while any of them may die.

Each rank that goes on says so to all others, and says whom it knows to have ended. Once
every member has come or ended, the ranks propose, in their order: a rank waits for the
proposal of each rank before it, or for word of that one's end. It adopts the last
proposal that it has heard, or else makes its own; it sends that to the ranks behind it,
and that is its decision ("hierarchical consensus", Guerraoui and Rodrigues, 2006).

So the first rank that lives on decides for all behind it. Those before it have died,
whatever they decided. The decision may hold a rank that has died since it came. Whoever
meets the others next finds that, and they agree again.

Nothing is taken back: a rank that gives up and calls again goes on with what came.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from commrt.bootstrap.survivors import Decision

__all__ = ["Ballot", "Vote", "Voter"]


class Vote(IntEnum):
    """A kind of message in an agreement."""

    CAME = 16
    """The sender goes on; with its blob."""
    GONE = 17
    """Some members have ended, and why."""
    PROPOSED = 18
    """The decision of the sender, for ranks behind it."""
    DECIDED = 19
    """The decision of the sender, for ranks that it leaves out."""


@dataclass
class Ballot:
    """One agreement as one rank knows it; the rank may not have come to it itself."""

    said: dict[int, bytes] = field(default_factory=dict)
    """Blobs of those that came."""
    gone: dict[int, str] = field(default_factory=dict)
    """Why the others come no more."""
    proposed: dict[int, Decision] = field(default_factory=dict)
    """By the rank that proposed it."""
    decided: Decision | None = None
    """The decision that leaves this rank out."""

    def take(self, vote: Vote, body: bytes) -> None:
        """Hear a message."""
        if vote == Vote.GONE:
            for rank, why in json.loads(body):
                self.gone.setdefault(rank, why)
        elif vote == Vote.DECIDED:
            self.decided = Decision.of(body)
        else:
            rank, rest = int.from_bytes(body[:4], "little"), body[4:]
            if vote == Vote.CAME:
                self.said[rank] = rest
            else:
                self.proposed[rank] = Decision.of(rest)


class Voter:
    """One rank in an agreement.

    Args:
        ballot: what it hears.
        members: ranks, in the order in which they propose; this ``rank`` is one.
        rank: the caller.
        post: sends a vote to a member; those of one rank to another arrive in order.
        gone: returns why a rank comes no more, as far as this process knows.
    """

    def __init__(
        self,
        ballot: Ballot,
        members: Sequence[int],
        rank: int,
        post: Callable[[Vote, bytes, int], object],
        gone: Callable[[int], str] | None,
    ) -> None:
        self._ballot, self._rank, self._post = ballot, rank, post
        self._members, self._gone = list(members), gone
        place = self._members.index(rank)
        self._before, self._behind = members[:place], members[place + 1 :]
        self.decision: Decision | None = None
        """Who goes on, once this is agreed."""

    def come(self, blob: bytes) -> None:
        """Say that this rank goes on."""
        self._ballot.said[self._rank] = blob
        self._tell_all(Vote.CAME, self._signed(blob))

    def step(self) -> bool:
        """Go on as far as can be now; return whether this rank has decided."""
        self._ask()
        if self._ballot.decided is not None:
            self.decision = self._ballot.decided
            return True
        if self.missing():
            return False
        heard = self._ballot.proposed
        last = [heard[rank] for rank in self._before if rank in heard][-1:]
        self.decision = last[0] if last else self._own()
        text = self.decision.text().encode()
        for rank in self._behind:
            self._post(Vote.PROPOSED, self._signed(text), rank)
        for rank in self.decision.gone:  # which may be a mistake
            if rank != self._rank:
                self._post(Vote.DECIDED, text, rank)
        return True

    def missing(self) -> list[int]:
        """Return the members for which this rank waits, as far as is known."""
        ballot = self._ballot
        unheard = [
            rank
            for rank in self._before
            if rank not in ballot.proposed and rank not in ballot.gone
        ]
        if any(rank in ballot.proposed for rank in self._before):
            return unheard
        absent = [
            rank
            for rank in self._members
            if rank not in ballot.said and rank not in ballot.gone
        ]
        return absent or unheard

    def _own(self) -> Decision:
        ballot = self._ballot
        said = {
            rank: ballot.said[rank] for rank in self._members if rank not in ballot.gone
        }
        return Decision(said, dict(ballot.gone), secrets.token_hex(8))

    def _ask(self) -> None:
        """Ask who has ended, and tell the others, who may not see it."""
        if self._gone is None:
            return
        news = []
        for rank in self._members:
            if rank == self._rank or rank in self._ballot.gone:
                continue
            if why := self._gone(rank):
                self._ballot.gone[rank] = why
                news.append((rank, why))
        if news:
            self._tell_all(Vote.GONE, json.dumps(news).encode())

    def _tell_all(self, vote: Vote, body: bytes) -> None:
        for rank in self._members:
            if rank != self._rank:
                self._post(vote, body, rank)

    def _signed(self, body: bytes) -> bytes:
        return self._rank.to_bytes(4, "little") + body
