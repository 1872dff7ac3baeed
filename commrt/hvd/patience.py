# SPDX-License-Identifier: Apache-2.0
"""Patience: the times at which one who waits warns, gives up, and ends the wait."""

from __future__ import annotations

import time

__all__ = ["Patience"]

_LAST_WORDS_S = 5.0
"""So long before its deadline a rank tells the others that it gives up: they have to
come to another round for that."""
_PART = 0.2
"""The part of a short limit that takes the place of that."""


class Patience:
    """The clock of one wait.

    Args:
        limit_s: seconds until its deadline.
        warning_s: seconds between warnings.
    """

    def __init__(self, limit_s: float, warning_s: float) -> None:
        self.limit_s = limit_s
        self._warning_s = warning_s
        self.asks = False
        """True while the ranks have been asked who is missing, and nobody was told."""
        self.begin()

    def begin(self) -> None:
        """Begin anew."""
        self._start = time.monotonic()
        self._next_warning = self._start + self._warning_s
        self._has_given_up = False

    def waited_s(self) -> float:
        """Return the seconds since its begin."""
        return time.monotonic() - self._start

    def next_s(self) -> float:
        """Return the seconds until something is due; 0 if it is."""
        due = [self._start + self.limit_s, self._next_warning]
        if not self._has_given_up:
            due.append(self._last_words)
        return max(0.0, min(due) - time.monotonic())

    @property
    def _last_words(self) -> float:
        before_s = min(_LAST_WORDS_S, _PART * self.limit_s)
        return self._start + self.limit_s - before_s

    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self._start + self.limit_s

    def takes_last_words(self) -> bool:
        """Return whether it is time to give up; True once."""
        is_due = not self._has_given_up and time.monotonic() >= self._last_words
        self._has_given_up |= is_due
        return is_due

    def warns(self) -> bool:
        """Return whether a warning is due; once for each."""
        now = time.monotonic()
        is_due = now >= self._next_warning
        if is_due:
            self._next_warning = now + self._warning_s
        return is_due
