# SPDX-License-Identifier: Apache-2.0
"""Streams, events and memory of communicators that failed.

As one is closed, its streams may still hold copies, and the host messages of which
peers bring the rest. All of it is given back once that is over for sure
(``StagedWork::give_rest_back``, ``LeftBuckets``): the ranks look as they make or close
such work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from commrt import _native

if TYPE_CHECKING:
    from commrt.job.world import World

__all__ = ["LeftWork", "StagedWork", "give_back", "leave"]

StagedWork = (
    _native.Stager | _native.MessageStager | _native.MpiWork | _native.HostedWork
)
LATER, GIVEN, NEVER = 0, 1, 2


class LeftWork(Protocol):
    """Closed work that may have left something."""

    @property
    def failed(self) -> bool:
        """Whether it has."""
        ...

    def give_rest_back(self) -> int:
        """Give it back where nobody uses it any more; 0: later, 1: done, 2: never."""
        ...


def leave(world: World, work: Iterable[LeftWork]) -> None:
    """Give closed work back that failed, now or at a later call."""
    world.left_behind.extend(each for each in work if each.failed)
    give_back(world)


def give_back(world: World) -> None:
    """Give back what nobody uses any more; what MPI may use for ever is forgotten."""
    left, world.left_behind = world.left_behind, []
    world.left_behind.extend(each for each in left if each.give_rest_back() == LATER)
