# SPDX-License-Identifier: Apache-2.0
"""Handles of operations: ask whether they are over, and wait for their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from commrt.errors import UsageError, shown
from commrt.hvd.entries import Entry
from commrt.hvd.session import Session

__all__ = ["Handle", "poll", "synchronize"]


class Handle:
    """One or more operations that were submitted together.

    Args:
        session: to which they were submitted.
        number: of the process set.
        entries: the operations.
        result: makes the result, once they are over.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        entries: Sequence[Entry],
        result: Callable[[], Any],
    ) -> None:
        self._session = session
        self._number = number
        self._entries: Sequence[Entry] = tuple(entries)
        self._making = threading.Lock()
        self._make: Callable[[], Any] | None = result
        self._result: Any = None

    def wait(self) -> Any:
        """Return the result once the operations are over; idempotent."""
        for entry in self._entries:
            self._session.wait(self._number, entry)
        with self._making:
            if self._make is not None:
                self._result, self._make = self._make(), None
                self._entries = ()
        return self._result

    def test(self) -> bool:
        """Return whether ``wait`` would not wait, after a little progress."""
        each = [self._session.poll(self._number, entry) for entry in self._entries]
        return all(each)

    def __call__(self) -> Any:
        """Return the result; handles of ``sparse_allreduce_async`` are called."""
        return self.wait()

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "the truth of a handle is not its completion: call hvd.poll(handle) or "
            "hvd.synchronize(handle)"
        )

    def __repr__(self) -> str:
        names = ", ".join(entry.name for entry in self._entries[:4])
        return f"<hvd.Handle of {names or 'what is over'}>"


def _checked(what: str, handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise UsageError(
            f"{what}: {shown(handle)} is no handle; functions whose names end with "
            f"_async return them"
        )
    return handle


def synchronize(handle: Handle) -> Any:
    """Return the result of an operation once it is over; raises its error.

    A call for a handle that was waited for returns the same result again.
    """
    return _checked("hvd.synchronize", handle).wait()


def poll(handle: Handle) -> bool:
    """Return whether ``synchronize`` would return at once, after a little progress."""
    return _checked("hvd.poll", handle).test()
