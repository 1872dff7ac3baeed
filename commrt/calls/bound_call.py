# SPDX-License-Identifier: Apache-2.0
"""An operation bound to its arguments that no single plan of the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["BoundCall"]


@dataclass(frozen=True, eq=False)
class BoundCall:
    """An operation bound to its arguments; call it, or start() it."""

    operation: str
    """Its name."""
    label: str
    """Name of the candidate that runs it."""
    run: Callable[[bool], Any]
    """Starts it; the argument says whether it is nonblocking."""

    def __call__(self) -> Any:
        """Run the operation and return its output."""
        return self.run(False)

    def start(self) -> Any:
        """Start the operation and return its request; wait before starting again."""
        return self.run(True)

    def __repr__(self) -> str:
        return f"<commrt.BoundCall {self.operation} by {self.label}>"
