# SPDX-License-Identifier: Apache-2.0
"""Who is told of a fault: of a timeout, of calls that differ, of a death.

Groups tell it here. Parts of higher layers, such as the dumps of last operations,
register to hear of it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from commrt.job.world import World

__all__ = ["Watcher", "add_watcher", "began", "failed", "worlds"]


class Watcher(Protocol):
    """Hears of worlds and of faults in them."""

    def began(self, world: World) -> None:
        """Hear of a world; its first group is being made."""
        ...

    def failed(self, world: World, reason: str, message: str) -> None:
        """Hear of a fault: ``timeout``, ``mismatch`` or ``death``, and its text."""
        ...


_WATCHERS: list[Watcher] = []
_WORLDS: weakref.WeakValueDictionary[int, World] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def add_watcher(watcher: Watcher) -> None:
    """Let somebody hear of worlds and faults from now on."""
    _WATCHERS.append(watcher)


def began(world: World) -> None:
    """Say that a group of a world is being made; only the first one counts."""
    with _LOCK:
        if _WORLDS.get(world.number) is world:
            return
        _WORLDS[world.number] = world
    for watcher in _WATCHERS:
        watcher.began(world)


def failed(world: World, reason: str, message: str) -> None:
    """Tell of a fault in a world."""
    for watcher in _WATCHERS:
        watcher.failed(world, reason, message)


def worlds() -> list[World]:
    """Return the worlds of this process that have had a group, the oldest first."""
    with _LOCK:
        return [world for _, world in sorted(_WORLDS.items())]
