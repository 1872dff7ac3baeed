# SPDX-License-Identifier: Apache-2.0
"""An account of the bytes of saved tensors in near memory."""

from __future__ import annotations

from commrt.errors import MemoryError_

__all__ = ["Ledger"]


class Ledger:
    """Counts bytes that are near, and refuses more than a budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.in_use = 0
        self.peak = 0
        """The most that was in use since ``restart``."""

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes more are within the budget."""
        return self.in_use + nbytes <= self.budget_bytes

    def take(self, nbytes: int) -> None:
        """Count bytes that are near from now on; MemoryError_ beyond the budget."""
        if not self.fits(nbytes):
            raise MemoryError_(
                f"OutOfCore: {nbytes} bytes more beside {self.in_use} that are near "
                f"are beyond budget_bytes={self.budget_bytes}; give more, cut blocks "
                f"into smaller ones, or make it with a sample as large as the input"
            )
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)

    def give(self, nbytes: int) -> None:
        """Count bytes no longer."""
        self.in_use -= nbytes

    def restart(self) -> None:
        """Begin a new peak with what is in use now."""
        self.peak = self.in_use
