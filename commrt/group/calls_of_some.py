# SPDX-License-Identifier: Apache-2.0
"""Calls that some ranks of a group make together, while the others know nothing of it.

Such a call has no place in the order of the group's operations. Each two ranks count
those that they have made together. A rank that refuses its call leaves word of that,
with these numbers: a rank that waits for it finds the number of its own call there, and
waits no more. Where the ranks of a refused call cannot be read, it may be a call of
each rank.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from commrt.bootstrap.base import VainWaitError
from commrt.errors import RefusedError
from commrt.group.group import Group
from commrt.group.refusals import said_refused
from commrt.job.world import check_alike

__all__ = ["CallsOfSome"]

_MOST_REFUSALS = 64
"""Refusals of a rank that end the wait of others. Of older ones only the last numbers
are kept: a rank that is farther behind hears of them when it meets that rank."""
_LONGEST_WHY = 1000
"""Characters of a reason that others read."""


@dataclass(frozen=True)
class _Refusal:
    """A call that a rank has refused."""

    why: str
    numbers: Mapping[int, int]
    """Which of its calls with a rank that was; the first one is 0."""
    with_others: int
    """Which of its calls it was with every rank that has no number there; -1: none."""

    def said(self) -> Any:
        return [self.why, [*self.numbers.items()], self.with_others]

    @classmethod
    def of(cls, said: Any) -> _Refusal:
        why, numbers, with_others = said
        return cls(why, {rank: number for rank, number in numbers}, with_others)

    def number_with(self, rank: int) -> int:
        """Return which of its calls with a rank it was; -1: none."""
        return self.numbers.get(rank, self.with_others)

    def and_later(self, other: _Refusal) -> _Refusal:
        """Return one that has the later number of both for each rank."""
        ranks = self.numbers.keys() | other.numbers.keys()
        numbers = {r: max(self.number_with(r), other.number_with(r)) for r in ranks}
        return _Refusal(self.why, numbers, max(self.with_others, other.with_others))


@dataclass(frozen=True)
class _Row:
    """A member's word to the others of a call."""

    numbers: Sequence[int]
    """Of its calls with each member: how many were before this one."""
    refusals: Sequence[_Refusal]
    older: _Refusal
    """The last numbers of all that were before these."""
    same: str
    """All members must say it alike."""

    @classmethod
    def of(cls, said: Any) -> _Row:
        numbers, refusals, older, same = said
        known = [_Refusal.of(each) for each in refusals]
        return cls(numbers, known, _Refusal.of(older), same)

    def refusal_of(self, rank: int, number: int) -> _Refusal | None:
        """Return the refusal of this call with a rank; None: it was not refused."""
        for refusal in self.refusals:
            if refusal.number_with(rank) == number:
                return refusal
        return self.older if self.older.number_with(rank) >= number else None


class CallsOfSome:
    """One rank's calls with some of its group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._key = f"comm{group.identity}/refused"
        self._lock = threading.Lock()
        self._with_all = 0
        self._with: dict[int, int] = {}
        """Calls with a rank, beside those with all."""
        self._refusals: deque[_Refusal] = deque()
        self._older = _Refusal("so many calls ago that it is not known why", {}, -1)
        """The last numbers of refusals that others cannot read any more."""

    @contextmanager
    def telling_all(self) -> Iterator[None]:
        """Let every rank learn of an error in here: it may wait for this one."""
        try:
            yield
        except Exception as error:
            with self._lock:
                known = {rank: self._number(rank) for rank in self._with}
                self._with_all += 1
                self._refuse(error, known, self._with_all - 1)
            raise

    @contextmanager
    def telling(self, ranks: Sequence[int]) -> Iterator[None]:
        """Let these ranks learn of an error in here: they wait for this one."""
        try:
            yield
        except Exception as error:
            with self._lock:
                numbers = {rank: self._number(rank) for rank in self._others(ranks)}
                self._pass(ranks)
                self._refuse(error, numbers, -1)
            raise

    def agree(self, ranks: Sequence[int], label: str, same: str) -> int:
        """Return the identity of a new group of ``ranks``; collective over them.

        ``label`` names these ranks, and ``same`` is what all of them must say. Raises
        RefusedError where one of them has refused its call.
        """
        group = self._group
        members = [group.world_ranks[rank] for rank in ranks]
        while True:
            with self._lock:
                mine = [
                    [self._number(rank) for rank in ranks],
                    [each.said() for each in self._refusals],
                    self._older.said(),
                    same,
                ]
            identity, said = group.world.meet_for_id(
                members,
                label,
                mine,
                group.timeout_s,
                heed=lambda: self._heed(ranks),
            )
            if self._settle(ranks, [_Row.of(each) for each in said]):
                return identity

    def _heed(self, ranks: Sequence[int]) -> None:
        """End a wait by RefusedError where one that this rank waits for has refused."""
        places = {self._group.world_ranks[rank]: rank for rank in self._others(ranks)}
        words = self._group.world.bootstrap.words(self._key, [*places])
        for place, word in words.items():
            number = self._number(places[place])
            for refusal in map(_Refusal.of, json.loads(word)):
                if refusal.number_with(self._group.rank) == number:
                    error = partial(self._refused, ranks, places[place], refusal)
                    raise VainWaitError(error)

    def _settle(self, ranks: Sequence[int], rows: Sequence[_Row]) -> bool:
        """Count the call, if it is the same one for all ranks; return whether it is.

        A late rank, at a call that another one has refused, may have met ranks that are
        at their next call already. The late rank raises RefusedError, and the others
        meet once more.
        """
        here = ranks.index(self._group.rank)
        if found := self._refused_to(ranks, rows, here):
            raise self._refused(ranks, *found)
        if any(self._refused_to(ranks, rows, at) for at in range(len(ranks))):
            return False
        members = [self._group.world_ranks[rank] for rank in ranks]
        check_alike(members, [row.same for row in rows])
        with self._lock:
            for at, rank in enumerate(ranks):
                # One of two may have given up a call that the other has completed.
                number = max(rows[here].numbers[at], rows[at].numbers[here]) + 1
                self._with[rank] = max(number, self._number(rank)) - self._with_all
        return True

    def _refused_to(
        self, ranks: Sequence[int], rows: Sequence[_Row], at: int
    ) -> tuple[int, _Refusal] | None:
        """Return who has refused the call that the member at a place is in, and why."""
        for by, row in enumerate(rows):
            if by == at:
                continue
            refusal = row.refusal_of(ranks[at], rows[at].numbers[by])
            if refusal is not None:
                return ranks[by], refusal
        return None

    def _refused(
        self, ranks: Sequence[int], by: int, refusal: _Refusal
    ) -> RefusedError:
        """Count the call, which does not happen; return what to raise."""
        with self._lock:
            self._pass(ranks)
        return RefusedError(
            f"create_group of ranks {[*ranks]} on {self._group.name}, rank "
            f"{self._group.rank}: {said_refused(by, refusal.why)}"
        )

    def _refuse(
        self, error: Exception, numbers: Mapping[int, int], with_others: int
    ) -> None:
        """Leave word of a refused call; hold the lock."""
        why = str(error).encode(errors="backslashreplace").decode()[:_LONGEST_WHY]
        self._refusals.append(_Refusal(why, numbers, with_others))
        if len(self._refusals) > _MOST_REFUSALS:
            self._older = self._older.and_later(self._refusals.popleft())
        word = json.dumps([each.said() for each in self._refusals]).encode()
        with suppress(Exception):  # of what carries it; the caller's error is raised
            self._group.world.bootstrap.leave_word(self._key, word)

    def _number(self, rank: int) -> int:
        """Return how many calls with a rank there have been."""
        return self._with_all + self._with.get(rank, 0)

    def _pass(self, ranks: Sequence[int]) -> None:
        """Count a call with these ranks; hold the lock."""
        for rank in ranks:
            self._with[rank] = self._with.get(rank, 0) + 1

    def _others(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self._group.rank]
