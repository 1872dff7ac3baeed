# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a process set have agreed on: the same on all, without a leader.

Each name that a rank submits gets a slot, which all ranks number alike. A rank keeps
the signature that each other one has told for a slot. So in later steps one bit says
that a rank has submitted the same operation again. Everything here follows from what
all ranks have seen, in one order: no rank decides for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from commrt.hvd.signatures import Signature

__all__ = ["Agreement", "Slot", "Told"]


@dataclass
class Slot:
    """A name, and what is known of it."""

    key: str
    signatures: dict[int, Signature] = field(default_factory=dict)
    """The signature that each rank has told last."""
    last_used: int = 0
    """Number of the round that used it last."""


@dataclass(frozen=True)
class Told:
    """One rank's part of an exchange of texts."""

    new: tuple[tuple[str, Signature], ...] = ()
    """Names with signatures that it has not told before, or told otherwise."""
    has: tuple[int, ...] = ()
    """Slots of its other operations that are not complete."""
    joined: bool = False
    """True if it has no more data."""
    gives_up: str = ""
    """Reason why all operations that are not complete shall fail; empty: none."""

    def as_json(self) -> list[Any]:
        """Return what ``json`` takes."""
        new = [[key, signature.as_json()] for key, signature in self.new]
        return [new, list(self.has), self.joined, self.gives_up]

    @classmethod
    def of_json(cls, told: list[Any]) -> Told:
        """Return what another rank has told."""
        new, has, joined, gives_up = told
        named = tuple((key, Signature.of_json(each)) for key, each in new)
        return cls(named, tuple(has), joined, gives_up)


class Agreement:
    """Slots, and which ranks have joined; equal on all ranks after each round.

    Args:
        size: number of ranks.
        capacity: slots that are kept; beyond it those go that were unused for longest.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self.size = size
        self.capacity = capacity
        self.round = 0
        self.joined: dict[int, None] = {}
        """Ranks that have joined, in the order in which they did."""
        self._slots: list[Slot | None] = []
        self._by_key: dict[str, int] = {}

    @property
    def num_slots(self) -> int:
        """Number of slots, with those that are free."""
        return len(self._slots)

    def find(self, key: str) -> int | None:
        """Return the slot of a name; None: it has none."""
        return self._by_key.get(key)

    def knows(self, rank: int, key: str, signature: Signature) -> bool:
        """Return whether a rank has told this signature for this name before."""
        index = self._by_key.get(key)
        return index is not None and self.slot(index).signatures.get(rank) == signature

    def slot(self, index: int) -> Slot:
        """Return a slot that is in use."""
        found = self._slots[index]
        assert found is not None, index
        return found

    def begin(self, complete: Iterable[int]) -> None:
        """Count a round, which has used these slots."""
        self.round += 1
        for index in complete:
            self.slot(index).last_used = self.round

    def take(self, told: Sequence[Told]) -> list[set[int]]:
        """Take what all ranks have told, and return the slots that each has submitted.

        Slots that nobody uses may go: more than ``capacity`` are kept for no reason.
        """
        has = [set(each.has) for each in told]
        for rank, each in enumerate(told):
            for key, signature in each.new:
                index = self._declare(key)
                self.slot(index).signatures[rank] = signature
                self.slot(index).last_used = self.round + 1
                has[rank].add(index)
        for rank, each in enumerate(told):
            if each.joined:
                self.joined.setdefault(rank)
        self._evict(set().union(*has))
        return has

    def complete(self, has: Sequence[set[int]]) -> list[int]:
        """Return the slots that all ranks have submitted that have not joined."""
        going = [has[rank] for rank in range(self.size) if rank not in self.joined]
        found = set.intersection(*going) if going else set().union(*has)
        return sorted(found)

    def missing(self, has: Sequence[set[int]]) -> dict[int, list[int]]:
        """Return, for each slot that some ranks have, the ranks that lack it."""
        return {
            index: [
                rank
                for rank in range(self.size)
                if index not in has[rank] and rank not in self.joined
            ]
            for index in sorted(set().union(*has))
        }

    def end_join(self) -> int:
        """Forget that all ranks have joined; return the one that was the last."""
        *_, last = self.joined
        self.joined.clear()
        return last

    def _declare(self, key: str) -> int:
        index = self._by_key.get(key)
        if index is None:
            free = [i for i, slot in enumerate(self._slots) if slot is None]
            index = free[0] if free else len(self._slots)
            if not free:
                self._slots.append(None)
            self._slots[index] = Slot(key)
            self._by_key[key] = index
        return index

    def _evict(self, used: set[int]) -> None:
        idle = [
            (slot.last_used, index)
            for index, slot in enumerate(self._slots)
            if slot is not None and index not in used
        ]
        for _, index in sorted(idle)[: max(0, len(self._by_key) - self.capacity)]:
            del self._by_key[self.slot(index).key]
            self._slots[index] = None
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
