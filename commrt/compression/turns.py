# SPDX-License-Identifier: Apache-2.0
"""Which of several operations in flight comes next with its second exchange.

First exchanges start in the calls, so in the same order on all ranks. Second ones start
when somebody tests or waits, and a rank may wait for a later operation first; but they
are collectives, too, and have to start in one order. So each has its turn after that of
the operation before it.
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
