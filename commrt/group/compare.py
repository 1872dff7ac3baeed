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
from collections.abc import Callable
from typing import Any, TypeVar

from commrt.errors import (
    ClosedError,
    MismatchError,
    PeerFailedError,
    ReductionError,
    RevokedError,
    TimeoutError_,
    TruncationError,
    UsageError,
)
from commrt.group.group import Group

__all__ = ["Comparison"]

T = TypeVar("T")

_OF_OPERATIONS = (
    ClosedError,
    MismatchError,
    PeerFailedError,
    ReductionError,
    RevokedError,
    TimeoutError_,
    TruncationError,
)
"""What a call raises whose operation has begun, or whose group has ended."""


def _nothing(_: Any) -> dict[str, Any]:
    return {}


class Comparison:
    """Compares calls of one group across its ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._derived = 0
        """Groups made of this one so far; equal on ranks whose calls were complete."""

    def together(
        self,
        what: str,
        check: Callable[[], T],
        *,
        timeout_s: float | None = None,
        describe: Callable[[T], dict[str, Any]] = _nothing,
    ) -> T:
        """Return ``check()``; in check mode every rank raises its UsageError.

        In check mode every rank raises MismatchError, too, where ``describe`` of the
        result differs.
        """
        checker = self._group.checker
        if checker is None:
            return check()
        try:
            found = check()
        except UsageError as error:
            self.tell(what, error, timeout_s)
            raise
        checker.compare({"operation": what, **describe(found)}, timeout_s)
        return found

    def refuse(self, what: str, error: Exception, timeout_s: float | None) -> None:
        """Let the other ranks learn that this rank's call was refused for ``error``.

        In check mode every rank raises it. An error of an operation is known to them.
        """
        if isinstance(error, _OF_OPERATIONS) or getattr(error, "on_all_ranks", False):
            return
        if self._group.checker is None:
            self._group.refuse(error)
        elif isinstance(error, UsageError):
            self.tell(what, error, timeout_s)
        else:
            told = UsageError(f"{what}: {type(error).__name__}: {error}")
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

        Raises MismatchError on all of them if some make another call.
        """
        group = self._group
        blob = json.dumps([what, said, self._derived]).encode()
        limit = group.timeout_s if timeout_s is None else timeout_s
        key = f"comm{group.identity}/calls"
        texts = group.world.bootstrap.exchange(group.world_ranks, key, blob, limit)
        rows = [json.loads(text) for text in texts]
        # One of them may have given up an earlier call that others completed.
        self._derived = max(row[2] for row in rows)
        if any(row[0] != what for row in rows):
            lines = [f"  rank {rank}: {row[0]}" for rank, row in enumerate(rows)]
            raise MismatchError(
                f"collective on {group.name}: the ranks disagree on operation; nothing "
                f"was sent; let all of them make the same call:\n" + "\n".join(lines)
            )
        return [row[1] for row in rows]

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
