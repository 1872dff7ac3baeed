# SPDX-License-Identifier: Apache-2.0
"""Comparison of a call across the ranks that make it.

A call that is planned once (a new communicator, a halo, a redistribution) is compared
always: what each rank says goes to all of them under one name, so a rank that makes
another call meanwhile is met there, too. Nothing is counted before all ranks have come,
so after an error on one rank, for which the others waited in vain, all of them may call
again. In check mode an error in one rank's arguments is told to all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from commrt.errors import ClosedError, MismatchError, UsageError
from commrt.group.group import Group
from commrt.group.refusals import is_untold, said_refused

__all__ = ["Comparison", "Refusing"]

T = TypeVar("T")


class Refusing(Protocol):
    """Runs calls in an order of its own."""

    def refuse(self, error: Exception) -> None:
        """Take the place of a call that was refused here."""
        ...


@dataclass(frozen=True)
class _Said:
    """A rank's message to the others that make its call."""

    what: str
    said: Any
    derived: int
    number: int
    """Of the next operation on its group."""
    refused: Mapping[int, str]
    """Its last calls that were refused, by their numbers, and why."""

    def blob(self) -> bytes:
        refused = [*self.refused.items()]
        said = self.what, self.said, self.derived, self.number, refused
        return json.dumps(said).encode()

    @classmethod
    def of(cls, blob: bytes) -> _Said:
        what, said, derived, number, refused = json.loads(blob)
        return cls(what, said, derived, number, {seq: why for seq, why in refused})


def _nothing(_: Any) -> dict[str, Any]:
    return {}


class Comparison:
    """Compares calls of one group across its ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.meeting: Callable[[], AbstractContextManager[None]] = nullcontext
        """The ranks meet in it; it gives away what is to run before."""
        self._derived = 0
        """Groups made of this one so far; equal on ranks whose calls were complete."""

    def together(
        self,
        what: str,
        check: Callable[[], T],
        *,
        timeout_s: float | None = None,
        describe: Callable[[T], dict[str, Any]] = _nothing,
        carrier: Refusing | None = None,
    ) -> T:
        """Return ``check()``; where it raises, the other ranks' call fails, too.

        In check mode every rank raises MismatchError, too, where ``describe`` of the
        result differs. ``carrier``: as in ``refuse``.
        """
        try:
            found = check()
        except Exception as error:
            self.refuse(what, error, timeout_s, carrier)
            raise
        checker = self._group.checker
        if checker is None:
            return found
        checker.compare({"operation": what, **describe(found)}, timeout_s)
        return found

    def limit(
        self,
        what: str,
        timeout_s: float | None,
        carrier: Refusing | None = None,
        *,
        here: str | None = None,
    ) -> float:
        """Return a call's limit; where it is wrong, the other ranks' call fails, too.

        ``carrier``: as in ``refuse``. ``here``: name of the call in the error.
        """
        try:
            return self._group.limit(here or what, timeout_s)
        except UsageError as error:
            self.refuse(what, error, None, carrier)
            raise

    def refuse(
        self,
        what: str,
        error: Exception,
        timeout_s: float | None,
        carrier: Refusing | None = None,
        *,
        meets: bool = False,
    ) -> None:
        """Let the other ranks learn that this rank's call was refused for ``error``.

        In check mode every rank raises it. ``meets``: there, too, the others wait in
        the call itself, and not where check mode compares. An error of an operation is
        known to them. ``carrier`` runs such calls; None: the group does.
        """
        if not is_untold(error):
            return
        if meets or self._group.checker is None:
            (carrier or self._group).refuse(error)
        elif isinstance(error, UsageError):
            self.tell(what, error, timeout_s)
        else:
            told = UsageError(f"{what}: {type(error).__name__}: {error}")
            with suppress(UsageError):  # this rank raises its own
                self.tell(what, told, timeout_s)

    def tell(self, what: str, error: UsageError, timeout_s: float | None) -> None:
        """In check mode, raise this rank's error on all ranks.

        The ranks have heard of an error that was told before, and of a closed group.
        """
        is_known = error.on_all_ranks or isinstance(error, ClosedError)
        checker = self._group.checker
        if checker is not None and not is_known:
            checker.tell(what, error, timeout_s)

    def meet(self, what: str, said: Any, timeout_s: float | None = None) -> list[Any]:
        """Return what each rank says (JSON) that makes this call; collective.

        Raises MismatchError on all of them if some make another call, and RefusedError
        where a rank's call was refused.
        """
        with self.meeting():
            rows = self._met(what, said, timeout_s)
        # One of them may have given up an earlier call that others completed.
        self._derived = max(row.derived for row in rows)
        if any(row.what != what for row in rows):
            lines = [f"  rank {rank}: {row.what}" for rank, row in enumerate(rows)]
            raise MismatchError(
                f"collective on {self._group.name}: the ranks disagree on operation; "
                f"nothing was sent; let all of them make the same call:\n"
                + "\n".join(lines)
            )
        return [row.said for row in rows]

    def _met(self, what: str, said: Any, timeout_s: float | None) -> list[_Said]:
        """Return what the ranks say, once all are at the same call."""
        group = self._group
        limit = group.timeout_s if timeout_s is None else timeout_s
        key = f"comm{group.identity}/calls"
        while True:
            number = group.next_seq
            mine = _Said(what, said, self._derived, number, {**group.own_refusals})
            rows = [
                _Said.of(text)
                for text in group.world.bootstrap.exchange(
                    group.world_ranks, key, mine.blob(), limit, group.heed_others
                )
            ]
            if all(row.number == number for row in rows):
                return rows
            self._settle(what, rows, number)

    def _settle(self, what: str, rows: Sequence[_Said], number: int) -> None:
        """Raise an error where ranks have met at calls of different numbers.

        A rank whose call was refused is at its next one, where it met ranks that do not
        know of that yet. They raise RefusedError; the others meet again.
        """
        first = min(row.number for row in rows)
        refused = {
            r: row.refused[first] for r, row in enumerate(rows) if first in row.refused
        }
        if not refused:
            lines = [
                f"  rank {r}: {row.what}, its operation #{row.number}"
                for r, row in enumerate(rows)
            ]
            raise MismatchError(
                f"collective on {self._group.name}: the ranks are not at the same "
                f"call; nothing was sent; let all of them make the same calls in the "
                f"same order:\n" + "\n".join(lines)
            )
        if number == first:
            rank, why = next(iter(refused.items()))
            raise self._group.refused_next(said_refused(rank, why))

    def meet_equal(self, what: str, mine: str, timeout_s: float | None = None) -> None:
        """Raise the same MismatchError on all ranks unless all of them say the same."""
        texts = self.meet(what, mine, timeout_s)
        if len({*texts}) > 1:
            lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
            raise MismatchError(
                f"{what} on {self._group.name}: the ranks disagree; pass equal "
                f"arguments:\n" + "\n".join(lines)
            )

    def label(self, how: str) -> tuple[str, str]:
        """Return a key under which the ranks of a new group meet, and its name.

        Call it where all ranks have met: they count alike. Names are the user's and may
        differ across ranks; the key may not.
        """
        self._derived += 1
        key = f"comm{self._group.identity}/{how}{self._derived}"
        return key, f"{self._group.name}.{how}{self._derived}"
