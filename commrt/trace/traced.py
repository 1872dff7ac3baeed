# SPDX-License-Identifier: Apache-2.0
"""A communicator, as far as logs and profilers look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from commrt.job.world import World

__all__ = ["Traced", "TracedNeighbors"]


class Traced(Protocol):
    """A communicator whose calls are recorded or shown to a profiler."""

    world: World
    world_ranks: tuple[int, ...]
    identity: int
    ranges: Any
    """Shows calls to a profiler; None where nobody asks for it."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def carriers_agreed(self) -> bool:
        """True if the ranks have agreed on what carries device arrays."""
        ...

    def shares_memory_with(self, rank: int) -> bool:
        """Return whether ``rank`` is reached over shared memory."""
        ...

    @property
    def explain(self) -> Callable[..., Any]:
        """A method that returns what a call would run, and why."""
        ...


class TracedNeighbors(Traced, Protocol):
    """A communicator over a grid or a graph."""

    def sent_to_neighbors(
        self, what: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> int:
        """Return the bytes that a call with these arguments sends to other ranks."""
        ...
