# SPDX-License-Identifier: Apache-2.0
"""Resources of failed communicators, freed once nothing uses them any more.

When a failed communicator closes, its device streams may still hold copies, and those
copies may wait for messages of peers. Its streams, events and memory are therefore kept
in the world. The rank tries again each time it makes or closes such work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from commrt import _native

if TYPE_CHECKING:
    from commrt.job.world import World

__all__ = ["DeferredWork", "StagedWork", "defer", "release_finished"]

StagedWork = _native.Stager | _native.MessageStager | _native.MpiWork | _native.HostWork
LATER, RELEASED, NEVER = 0, 1, 2


class DeferredWork(Protocol):
    """Closed work that may still hold resources of a device."""

    @property
    def failed(self) -> bool:
        """True if the work failed, so that its close may have freed only a part."""
        ...

    def release_rest(self) -> int:
        """Free what nothing uses any more; return LATER, RELEASED or NEVER."""
        ...


def defer(world: World, work: Iterable[DeferredWork]) -> None:
    """Free what closed work still holds, now if possible, else at a later call."""
    world.deferred.extend(each for each in work if each.failed)
    release_finished(world)


def release_finished(world: World) -> None:
    """Free deferred resources that nothing uses any more.

    Memory that an MPI library may use without end is dropped from the list unfreed.
    """
    pending, world.deferred = world.deferred, []
    if pending:
        world.engine.step()  # what has failed ends in a pass, if nobody waits for it
    world.deferred.extend(each for each in pending if each.release_rest() == LATER)
