# SPDX-License-Identifier: Apache-2.0
"""Operations bound to their arguments: their binders, and one that runs a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

__all__ = ["Binder", "Binders", "BoundCall", "Planned"]


class Planned(Protocol):
    """An operation bound to its arguments, as ``comm.plan`` returns it."""

    @property
    def operation(self) -> str:
        """Its name."""
        ...

    @property
    def label(self) -> str:
        """Name of the candidate that runs it."""
        ...

    def __call__(self) -> Any:
        """Run the operation and return its output."""
        ...

    def start(self) -> Any:
        """Start the operation and return its request; wait before starting again."""
        ...


Binder: TypeAlias = Callable[..., Planned]
"""Takes the arguments of ``comm.plan``'s method, and returns the bound call."""
Binders: TypeAlias = Mapping[str, Binder]
"""The binder of each operation of a feature, by the operation's name."""


@dataclass(frozen=True, eq=False)
class BoundCall:
    """An operation that no single plan of the engine runs; call it, or start() it."""

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
