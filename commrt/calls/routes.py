# SPDX-License-Identifier: Apache-2.0
"""Routes: the ways of a call that the engine did not recognise at a glance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeAlias

from commrt.calls.arguments import Bound, Call

__all__ = ["Again", "Route"]

Again: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Returns the request of a call like one before; None to look at it in full."""


class Route(Protocol):
    """One way to run calls. ``Collectives`` asks a call's routes in order."""

    asked_by: ClassVar[tuple[str, ...]]
    """Arguments of a call that ask for this route."""

    @property
    def is_open(self) -> bool:
        """True if the route also takes calls that do not ask for it."""

    @property
    def again(self) -> Again | None:
        """Starts a call like one before, by its arguments alone."""

    def prepare(self, call: Call, bound: Bound) -> Callable[[], Any] | None:
        """Check a call, and return what starts it; None where another route runs it.

        The answer must be the same on all ranks. In check mode the ranks are compared
        here, and a UsageError is raised on all of them: so it must come before.
        Starting the call returns its output or its request.
        """

    def bind(self, call: Call, bound: Bound) -> Any:
        """Return a persistent call; None where another route runs it. As prepare."""
