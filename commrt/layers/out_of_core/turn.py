# SPDX-License-Identifier: Apache-2.0
"""A lock that its holder may take again, and that a finalizer can try."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turn"]


class Turn:
    """Lets one thread at a time in; that one may enter again.

    ``threading.RLock`` does not say whether the thread that asks has it already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            self._lock.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def enter_if_free(self) -> bool:
        """Enter and return True unless any thread, this one included, is in."""
        if self._owner == threading.get_ident() or not self._lock.acquire(False):
            return False
        self._owner = threading.get_ident()
        self._depth = 1
        return True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Leave at the end what ``enter_if_free`` has entered."""
        try:
            yield
        finally:
            self.__exit__()
