# SPDX-License-Identifier: Apache-2.0
"""Ends a rank's wait for others that come no more, as their communicator has failed.

Ranks exchange small blobs while they make communicators and memory. A rank whose
communicator has failed does not come to that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Heeds"]


class Heeds(threading.local):
    """Checks that one thread makes while it waits in exchanges of its world."""

    def __init__(self) -> None:
        self._checks: list[Callable[[], object]] = []
        self._begun: list[Callable[[str], object]] = []

    def __call__(self) -> None:
        """Make all checks; one that raises ends the wait."""
        for check in self._checks:
            check()

    @contextmanager
    def until(self, check: Callable[[], object]) -> Iterator[None]:
        """Make a check in all waits in here.

        Where anything raises in here, groups that were begun are given up: other ranks
        may have made them, and would wait for this one.
        """
        outer, self._begun = self._begun, []
        self._checks.append(check)
        try:
            yield
        except BaseException as error:
            for give_up in self._begun:
                give_up(f"it was not made whole: {error}")
            raise
        else:
            if len(self._checks) > 1:  # what is made outside may fail yet
                outer += self._begun
        finally:
            self._checks.pop()
            self._begun = outer

    def begin(self, give_up: Callable[[str], object]) -> None:
        """Note how to give a group up that is being made."""
        if self._checks:
            self._begun.append(give_up)
