# SPDX-License-Identifier: Apache-2.0
"""Progress on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from commrt.vocabulary.limits import NO_LIMIT_S

__all__ = ["Progress"]

_WIDTH = 28
_BAR_EVERY_S = 0.1
_LINE_EVERY_S = 10.0


class Progress:
    """Shows how much of the budget is used and what is being measured.

    Args:
        budget_s: how long the whole run may take.
        stream: where to write.
        clock: seconds, monotonic; for tests.
    """

    def __init__(
        self,
        budget_s: float,
        stream: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget_s = budget_s
        self._stream = stream
        self._clock = clock
        self._start_s = clock()
        self._last_s = float("-inf")
        self._tty = stream.isatty()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; never below 0."""
        return max(0.0, self._budget_s - self.elapsed_s)

    def show(self, what: str) -> None:
        """Name the current measurement; most calls write nothing."""
        now_s = self._clock()
        every_s = _BAR_EVERY_S if self._tty else _LINE_EVERY_S
        if now_s - self._last_s < every_s:
            return
        self._last_s = now_s
        limited = self._budget_s < NO_LIMIT_S
        left = f"{self.left_s:3.0f} s left" if limited else "no limit"
        if not self._tty:
            self._write(f"commrt-tune: {left}: {what}\n")
            return
        done = 1 - self.left_s / self._budget_s
        bar = ("#" * round(done * _WIDTH)).ljust(_WIDTH, "-")
        self._write(f"\r\x1b[K[{bar}] {left}  {what[:60]}")

    def note(self, text: str) -> None:
        """Write a line that stays."""
        start = "\r\x1b[K" if self._tty else ""
        self._write(f"{start}{text}\n")

    def close(self) -> None:
        """Take the bar away."""
        if self._tty:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
