# SPDX-License-Identifier: Apache-2.0
"""Holders: who uses a world, so that it ends when nobody does any more.

A world has descriptors, threads and connections. Objects of Python that refer to each
other keep it until the garbage collector comes; so it ends by this count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Holders"]


class Holders:
    """Counts those who use a world: its groups, and whoever makes further ones."""

    def __init__(self) -> None:
        # The garbage collector may end a group wherever a thread has it.
        self._lock = threading.RLock()
        self._count = 0
        self.at_end: list[Callable[[], object]] = []
        """Functions to call when the last one has gone."""

    def begin(self) -> None:
        """Count one more."""
        with self._lock:
            self._count += 1

    def end(self) -> None:
        """Count one less; end the world after the last one."""
        with self._lock:
            self._count -= 1
            ends = []
            if self._count == 0:
                ends, self.at_end = self.at_end, []
        for end in ends:
            end()
