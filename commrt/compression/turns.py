# SPDX-License-Identifier: Apache-2.0
"""Turns of operations in flight: they start their second exchanges one by one.

All ranks must start exchanges in one order. First exchanges start in the calls, so
their order is the same everywhere. A second exchange starts when somebody tests or
waits, and a rank may wait for a later operation first. So each operation has its turn
after the operation before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from commrt.group.stepped import SteppedRequest

__all__ = ["Place", "Turn"]


@dataclass
class Place:
    """An operation's place in the order."""

    passed: bool = False
    """True once its second exchange has started, or will never start."""


class Turn:
    """The wait of an operation for its second exchange, in the form of a request."""

    def __init__(self, earlier: SteppedRequest | None, place: Place) -> None:
        """``earlier`` is the operation before, and ``place`` its place."""
        # Held until then: nobody else may wait for it any more, and its turn must come.
        self._earlier = earlier
        self._place = place

    def test(self) -> bool:
        """Run a little progress of the earlier operation; True once it has passed."""
        if self._earlier is None or self._place.passed:
            return True
        try:
            self._earlier.test()
        except Exception:
            if not self._earlier.done:
                raise
        return self._place.passed

    def be_quiet(self) -> None:
        """Do nothing: the earlier operation warns for itself."""

    def wait(self, *, timeout_s: float) -> None:
        """Return once it has passed. Its error is for those who wait for it."""
        if self._earlier is None or self._place.passed:
            return
        try:
            self._earlier.wait(timeout_s=timeout_s)
        except Exception:
            if not self._earlier.done:
                raise
