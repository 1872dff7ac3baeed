# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a communicator compare a call that all of them make.

A call that is planned once (a new communicator, a halo, a redistribution) is compared
always: what each rank says goes to all of them under one name, so a rank that makes
another call meanwhile is met there, too. Nothing is counted before all ranks have come,
so after an error on one rank, for which the others waited in vain, all of them may call
again. In check mode an error in one rank's arguments is told to all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from commrt.errors import ClosedError, MismatchError, UsageError
from commrt.messages.point_to_point import PointToPoint

if TYPE_CHECKING:
    from commrt.calls.check_mode import Checker

__all__ = ["Meeting"]

T = TypeVar("T")


def _nothing(_: Any) -> dict[str, Any]:
    return {}


class Meeting(PointToPoint):
    """The part of a communicator that compares calls."""

    checker: Checker | None
    _derived: int
    """What was made of it so far; equal on ranks whose calls were complete."""
    identity: int

    def _together(
        self,
        what: str,
        check: Callable[[], T],
        *,
        timeout_s: float | None = None,
        describe: Callable[[T], dict[str, Any]] = _nothing,
    ) -> T:
        """Return what ``check`` does; in check mode its UsageError is every rank's.

        So are, then, differences in what ``describe`` says of it.
        """
        checker = self.checker
        if checker is None:
            return check()
        try:
            found = check()
        except UsageError as error:
            self._tell(what, error, timeout_s)
            raise
        checker.compare({"operation": what, **describe(found)}, timeout_s)
        return found

    def _tell(self, what: str, error: UsageError, timeout_s: float | None) -> None:
        """In check mode, raise this rank's error on all ranks.

        They know one that they have been told, and that the communicator is closed.
        """
        known = getattr(error, "is_told", False) or isinstance(error, ClosedError)
        if self.checker is not None and not known:
            self.checker.tell(what, error, timeout_s)

    def _meet(self, what: str, said: Any, timeout_s: float | None = None) -> list[Any]:
        """Return what all ranks say who make this call; JSON.

        Raises MismatchError on all of them if some make another call.
        """
        blob = json.dumps([what, said, self._derived]).encode()
        limit = self.timeout_s if timeout_s is None else timeout_s
        key = f"comm{self.identity}/calls"
        texts = self.world.bootstrap.exchange(self.world_ranks, key, blob, limit)
        rows = [json.loads(text) for text in texts]
        # One of them may have given up an earlier call that others completed.
        self._derived = max(row[2] for row in rows)
        if any(row[0] != what for row in rows):
            lines = [f"  rank {rank}: {row[0]}" for rank, row in enumerate(rows)]
            raise MismatchError(
                f"collective on {self.name}: the ranks disagree on operation; nothing "
                f"was sent:\n" + "\n".join(lines)
            )
        return [row[1] for row in rows]

    def _meet_equal(self, what: str, mine: str, timeout_s: float | None = None) -> None:
        """Raise the same MismatchError on all ranks unless all of them say the same."""
        texts = self._meet(what, mine, timeout_s)
        if len({*texts}) > 1:
            lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
            raise MismatchError(
                f"{what} on {self.name}: the ranks disagree; pass equal arguments:\n"
                + "\n".join(lines)
            )

    def _label(self, how: str) -> tuple[str, str]:
        """Return the key under which the ranks meet, and the new name for people.

        To be called where all ranks have met: they count alike. Names are the user's
        and may differ across ranks; the key may not.
        """
        self._derived += 1
        key = f"comm{self.identity}/{how}{self._derived}"
        return key, f"{self.name}.{how}{self._derived}"
