# SPDX-License-Identifier: Apache-2.0
"""Negotiation: rounds in which the ranks find out what all of them have submitted.

A round is one ``allreduce`` (bitwise and) of ``8 * (1 + ceil(slots / 64))`` bytes. It
has a bit for each slot, set by ranks that have submitted its operation, and two flags.
A slot whose bit is left is complete. The flags say that no rank has news to tell, and
that all ranks wait. Where a rank has news, such as a name that it submits for the first
time, the round goes on with two more collectives: the ranks gather the lengths of their
texts, and then the texts. Every rank draws the same conclusions, so no rank leads.

A rank starts a round when it waits, or has submitted enough for a bucket. All of it is
nonblocking: a rank computes on while a round is under way.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commrt.comm import Communicator
from commrt.hvd.agreement import Agreement, Told
from commrt.hvd.entries import Entry
from commrt.hvd.signatures import Signature
from commrt.request import Request

__all__ = ["Complete", "Negotiation", "Outcome"]

Words: TypeAlias = NDArray[np.uint64]

_WORD = 64
_ALL = np.uint64(2**_WORD - 1)
_NO_NEWS, _WAITS = np.uint64(1), np.uint64(2)
_FLAGS_ONLY = 1
"""Words before those of the slots."""


@dataclass(frozen=True)
class Complete:
    """An operation that all ranks have submitted that have not joined."""

    key: str
    entry: Entry | None
    """This rank's; None: this rank has joined, and has none."""
    signatures: Mapping[int, Signature]


@dataclass
class Outcome:
    """What a round has found, the same on all ranks but for the entries."""

    complete: list[Complete] = field(default_factory=list)
    all_wait: bool = False
    """True if each rank waited when it started the round."""
    had_news: bool = False
    """True if the ranks have exchanged texts."""
    missing: list[tuple[Entry, list[int]]] = field(default_factory=list)
    """This rank's other operations, and the ranks that lack each; of a round with
    texts."""
    given_up: list[Entry] = field(default_factory=list)
    """This rank's operations that end in a failure."""
    why_given_up: str = ""
    last_joined: int | None = None
    """The rank that joined last, once all have joined; else None."""
    joined: frozenset[int] = frozenset()
    """Ranks that have joined, as the round's operations go."""


class Negotiation:
    """The rounds of one process set.

    Args:
        comm: of its own, over the ranks of the set.
        agreement: of these ranks.
    """

    def __init__(self, comm: Communicator, agreement: Agreement) -> None:
        self._comm = comm
        self.agreement = agreement
        self._news: deque[Entry] = deque()
        self._submitted: dict[int, Entry] = {}
        self._told = Told()
        self._declared: list[Entry] = []
        self._request: Request | None = None
        self._next: Callable[[], Outcome | None] = self._after_bits
        self._words: Words = np.empty(0, np.uint64)
        self._lengths: NDArray[np.int64] = np.empty(0, np.int64)
        self._text: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._texts: NDArray[np.uint8] = np.empty(0, np.uint8)

    # -- what this rank has ------------------------------------------------------

    def submit(self, entry: Entry) -> None:
        """Take an operation for one of the next rounds."""
        self._news.append(entry)

    @property
    def news_nbytes(self) -> int:
        """Bytes of operations that no round has seen."""
        return sum(entry.nbytes for entry in tuple(self._news))

    @property
    def has_news(self) -> bool:
        """True if there are operations that no round has seen."""
        return bool(self._news)

    @property
    def is_empty(self) -> bool:
        """True if this rank has nothing to agree on."""
        return not (self._news or self._submitted or self._declared)

    @property
    def request(self) -> Request | None:
        """The collective of the round that is under way; None: there is no round."""
        return self._request

    def entries(self) -> list[Entry]:
        """Return this rank's operations that are not complete."""
        return [*self._submitted.values(), *self._declared, *self._news]

    # -- a round -----------------------------------------------------------------

    def start(
        self,
        *,
        waits: bool,
        joins: bool = False,
        asks: bool = False,
        gives_up: str = "",
    ) -> None:
        """Start a round, which tells the others of all that this rank has submitted.

        Args:
            waits: whether this rank waits, so that it can submit nothing more.
            joins: whether it has no more data.
            asks: whether to exchange texts in any case, to learn which ranks are
                missing.
            gives_up: the reason why all that is not complete shall fail.
        """
        assert self._request is None
        rank, agreement = self._comm.rank, self.agreement
        self._take_news()
        new = tuple((entry.key, entry.signature) for entry in self._declared)
        has = tuple(sorted(self._submitted))
        self._told = Told(new, has, joins, gives_up)
        has_joined = rank in agreement.joined
        joining = joins and not has_joined
        # The bits of a rank that has joined do not say which operations it has left.
        tells = bool(new) or joining or asks or bool(gives_up)
        tells |= has_joined and bool(has)
        flags = _ALL
        if tells:
            flags ^= _NO_NEWS
        if not waits:
            flags ^= _WAITS
        bits = self._bits()
        self._words = np.concatenate([np.array([flags], np.uint64), bits])
        self._request = self._comm.allreduce(self._words, op="band", nonblocking=True)
        self._next = self._after_bits

    def step(self) -> Outcome | None:
        """Go on with the round that is under way; return what it has found at its end.

        None: it has not ended. Raises what its collectives raise.
        """
        while self._request is not None and self._request.test():
            self._request = None
            outcome = self._next()
            if outcome is not None:
                return outcome
        return None

    def _take_news(self) -> None:
        """Move operations from the news to those that this round tells of."""
        rank, agreement = self._comm.rank, self.agreement
        taken = {entry.key for entry in self._submitted.values()}
        later: list[Entry] = []
        for _ in range(len(self._news)):
            entry = self._news.popleft()
            if entry.key in taken:  # an unnamed one, whose key an earlier one has
                later.append(entry)
                continue
            taken.add(entry.key)
            if agreement.knows(rank, entry.key, entry.signature):
                index = agreement.find(entry.key)
                assert index is not None
                self._submitted[index] = entry
            else:
                self._declared.append(entry)
        self._news.extendleft(reversed(later))

    def _bits(self) -> Words:
        """Return a bit for each slot, set where this rank has submitted it."""
        num_words = -(-self.agreement.num_slots // _WORD)
        if self._comm.rank in self.agreement.joined:
            return np.full(num_words, _ALL)
        bits = np.zeros(num_words * _WORD, np.uint8)
        bits[list(self._submitted)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint64)

    def _after_bits(self) -> Outcome | None:
        flags = self._words[0]
        if flags & _NO_NEWS:
            bits = np.unpackbits(
                self._words[_FLAGS_ONLY:].view(np.uint8), bitorder="little"
            )
            complete = [int(index) for index in bits.nonzero()[0]]
            return self._concluded(complete, Outcome(all_wait=bool(flags & _WAITS)))
        encoded = json.dumps(self._told.as_json()).encode()
        self._text = np.frombuffer(encoded, np.uint8)
        self._lengths = np.empty(self._comm.size, np.int64)
        self._request = self._comm.allgather(
            np.array([len(encoded)]), out=self._lengths, nonblocking=True
        )
        self._next = self._after_lengths
        return None

    def _after_lengths(self) -> Outcome | None:
        self._texts = np.empty(int(self._lengths.sum()), np.uint8)
        self._request = self._comm.allgatherv(
            self._text, counts=self._lengths, out=self._texts, nonblocking=True
        )
        self._next = self._after_texts
        return None

    def _after_texts(self) -> Outcome:
        ends = self._lengths.cumsum()
        told = [
            Told.of_json(json.loads(self._texts[end - length : end].tobytes()))
            for end, length in zip(ends, self._lengths, strict=True)
        ]
        agreement = self.agreement
        has = agreement.take(told)
        for entry in self._declared:
            index = agreement.find(entry.key)
            assert index is not None
            self._submitted[index] = entry
        self._declared = []
        waits = bool(self._words[0] & _WAITS)
        outcome = Outcome(all_wait=waits, had_news=True)
        missing = agreement.missing(has)
        self._concluded(agreement.complete(has), outcome, has)
        for index in sorted(self._submitted):
            outcome.missing.append((self._submitted[index], missing[index]))
        reasons = [each.gives_up for each in told if each.gives_up]
        if reasons:
            outcome.why_given_up = reasons[0]
            outcome.given_up = [entry for entry, _ in outcome.missing]
            self._submitted.clear()
        if len(agreement.joined) == agreement.size:
            outcome.last_joined = agreement.end_join()
        return outcome

    def _concluded(
        self,
        complete: list[int],
        outcome: Outcome,
        has: Sequence[set[int]] | None = None,
    ) -> Outcome:
        """Note that slots are complete, and return the outcome.

        Args:
            complete: the slots.
            outcome: to which they are added.
            has: the slots of each rank; None: all have them that have not joined.
        """
        agreement = self.agreement
        agreement.begin(complete)
        outcome.joined = frozenset(agreement.joined)
        for index in complete:
            slot = agreement.slot(index)
            signatures = {
                rank: signature
                for rank, signature in sorted(slot.signatures.items())
                if (rank not in agreement.joined if has is None else index in has[rank])
            }
            entry = self._submitted.pop(index, None)
            outcome.complete.append(Complete(slot.key, entry, signatures))
        return outcome
