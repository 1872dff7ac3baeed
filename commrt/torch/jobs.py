# SPDX-License-Identifier: Apache-2.0
"""Communicators for torch's groups: the ranks meet in the store that torch gives.

The default group's ranks are a world, and a later group a communicator of some of them,
made by its members alone. A group whose default group is another backend's is a world
by itself. All of them share the process's engine, so that who waits in one serves the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commrt.bootstrap.single import SingleBootstrap
from commrt.bootstrap.store import StoreBootstrap
from commrt.comm import Communicator
from commrt.launch import LaunchInfo
from commrt.runtime import join_world
from commrt.world import World

__all__ = ["Member", "join", "leave"]


@dataclass(frozen=True)
class Member:
    """This process's place in a group of torch."""

    store: Any
    """Of this group alone."""
    rank: int
    """In the group."""
    size: int
    """Of the group."""
    ranks: Sequence[int]
    """Its ranks in the default group, in order; empty for the default group itself."""
    name: str
    """torch's name of the group; the same on all of its ranks."""
    timeout_s: float
    """Limit of its calls."""

    @property
    def is_default(self) -> bool:
        """Whether it is the group of all ranks."""
        return not self.ranks


class _Jobs:
    """The worlds of this process's groups."""

    def __init__(self) -> None:
        self.default: World | None = None
        self.alone: World | None = None


_JOBS = _Jobs()


def join(member: Member) -> Communicator:
    """Return the communicator of a group; collective over its ranks."""
    if member.size == 1:
        return _alone(member)
    if _JOBS.default is not None and not member.is_default:
        return _communicator(_JOBS.default, member.ranks, member)
    world = _world_of(member)
    comm = _communicator(world, range(member.size), member)
    if member.is_default:
        _JOBS.default = world
    return comm


def leave(world_of: Communicator, is_default: bool) -> None:
    """Forget the world of the default group: the next one is another job."""
    world = world_of._world
    if is_default and _JOBS.default is world:
        _JOBS.default = None
    if _JOBS.default is not world and world.relay is not None:
        world.relay.close()


def _alone(member: Member) -> Communicator:
    """Return a communicator of this rank only: nobody is asked, nothing is shared."""
    if _JOBS.alone is None:
        launch = LaunchInfo("torch", 0, 1, "a process group of torch")
        _JOBS.alone = join_world(SingleBootstrap(), launch, member.timeout_s)
    return _communicator(_JOBS.alone, [0], member)


def _world_of(member: Member) -> World:
    source = f"the process group {member.name!r} of torch"
    launch = LaunchInfo("torch", member.rank, member.size, source)
    bootstrap = StoreBootstrap(member.store, member.rank, member.size)
    return join_world(bootstrap, launch, member.timeout_s)


def _communicator(world: World, ranks: Sequence[int], member: Member) -> Communicator:
    limit = member.timeout_s
    label = f"torch/{member.name}"
    identity = world.agree_id(ranks, label, timeout_s=limit)
    comm = Communicator(
        world, ranks, f"torch group {member.name}", identity, timeout_s=limit
    )
    comm.timeout_s = limit
    return comm
