# SPDX-License-Identifier: Apache-2.0
"""Bells: words in memory of a node by which its ranks wake one that sleeps.

A process sleeps by one set of bells. So a world whose ranks all have bells in common,
as those of an earlier world, takes these. ``native/engine/bell.hpp`` has the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commrt import _native

if TYPE_CHECKING:
    from commrt.job.world import World

__all__ = ["NodeBells", "hang_bells", "own_bells"]

_REGION_NBYTES = 128


@dataclass(frozen=True)
class NodeBells:
    """The bells of a world's ranks on this node."""

    native: _native.Bells
    """The words."""
    member_of: dict[int, int]
    """For each of these ranks of the world, its number among the bells' members."""

    def of(self, world_ranks: Sequence[int]) -> list[int]:
        """Return the number of each rank, -1 for ranks of other nodes."""
        return [self.member_of.get(rank, -1) for rank in world_ranks]


def own_bells(engine: _native.Engine) -> dict[str, int]:
    """Return the bells that this process has: its number in each, by name."""
    return {bells.name: bells.own for bells in engine.bells}


def hang_bells(world: World, known: Mapping[int, Mapping[str, int]]) -> NodeBells:
    """Return bells for the ranks of this node; collective over them.

    ``known`` has the ``own_bells`` of each of these ranks.
    """
    members = sorted(known)
    engine: _native.Engine = world.engine
    common = set.intersection(*({*known[rank]} for rank in members))
    if common:
        name = min(common)
        found = next(bells for bells in engine.bells if bells.name == name)
        return NodeBells(found, {rank: known[rank][name] for rank in members})
    name = f"{world.job}/{members[0]}"
    own = members.index(world.rank)
    if world.in_process:
        made = _native.bells_of_threads(name, len(members), own)
    else:
        arena = world.share_memory(members, "bells", _REGION_NBYTES)
        made = _native.Bells(
            name, arena.address, arena.region_nbytes, len(members), own
        )
    engine.add_bells(made)
    return NodeBells(made, {rank: i for i, rank in enumerate(members)})
