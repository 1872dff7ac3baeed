# SPDX-License-Identifier: Apache-2.0
"""Found a communicator of ranks of which some may die meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from commrt import _native, env
from commrt.backends.catalog import catalog
from commrt.bootstrap.base import Bootstrap
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.calls.channel import Channel
from commrt.calls.settings import Settings
from commrt.errors import BackendError, CommError
from commrt.job.world import World, connect_world
from commrt.launch.detect import LaunchInfo

__all__ = ["Founder"]

Plain = TypeVar("Plain", bound=Channel)
_MADE = b"made"


@dataclass(frozen=True)
class Founder(Generic[Plain]):
    """Makes communicators that are alike, whoever their ranks will be."""

    make: Callable[..., Plain]
    """Makes one, from a world, its ranks, a name and an identity."""
    name: str
    launch: LaunchInfo
    """Who started this process."""
    engine: Any
    """This process's engine."""
    in_process: bool
    """True if the ranks are threads of this process."""
    deterministic: bool
    settings: Settings
    timeout_s: float
    """Its limit; equal on all ranks, as the rest is."""
    node: int
    """This rank's node, where nodes are pretended."""
    chaos: _native.Chaos | None = None
    """Injects faults into its operations, and goes on counting them; None: nobody asks.
    """

    def found(self, peers: Bootstrap, deadline: float) -> tuple[Plain, list[int]]:
        """Return a communicator of these ranks, or of those of them that live.

        All that return have the same one: no rank uses it before all have made it.
        Returns with it which of the ranks of ``peers`` are in it, in its order.
        """
        living = list(range(peers.size))
        while True:
            made: Plain | None = None
            said = _MADE
            failure: CommError | None = None
            left_s = max(0.0, deadline - time.monotonic())
            try:
                made = self._made_with(peers, left_s)
            except CommError as error:
                failure, said = error, f"{type(error).__name__}: {error}".encode()
            left_s = max(0.0, deadline - time.monotonic())
            rest, all_said = peers.regroup(range(peers.size), "made", said, left_s)
            if len(all_said) == peers.size:
                wrong = [rank for rank, blob in all_said.items() if blob != _MADE]
                if made is not None and not wrong:
                    rest.close()
                    return made, living
                if failure is None:
                    why = all_said[wrong[0]].decode()
                    failure = BackendError(f"rank {wrong[0]} of {self.name}: {why}")
                raise failure
            if made is not None:  # somebody has died meanwhile
                made.give_up("a rank died before all had made it")
                made.free()
            peers, living = rest, [living[rank] for rank in all_said]

    def _made_with(self, peers: Bootstrap, limit_s: float) -> Plain:
        world = self._world_of(peers, limit_s)
        everybody = range(world.size)
        wish = self.deterministic
        same = f"deterministic={wish}"
        identity = world.agree_id(everybody, "world", same, limit_s)
        made = self.make(
            world,
            everybody,
            self.name,
            identity,
            deterministic=wish,
            native_comm=world.mpi_of_all,
            timeout_s=limit_s,
            settings=self.settings,
        )
        made.timeout_s = self.timeout_s
        return made

    def _world_of(self, peers: Bootstrap, limit_s: float) -> World:
        if isinstance(peers, MpiBootstrap):
            peers = peers.renewed(limit_s)
        parts = None
        if env.read_nodes() is not None:  # of the ranks of the job, some of them gone
            everybody, node = range(peers.size), str(self.node).encode()
            said = peers.exchange(everybody, "parts", node, limit_s)
            parts = [int(each) for each in said]
        world = connect_world(
            peers,
            replace(self.launch, rank=peers.rank, size=peers.size),
            catalog(),
            in_process=self.in_process,
            engine=self.engine,
            timeout_s=limit_s,
            parts=parts,
        )
        world.timeout_s = self.timeout_s
        world.chaos = self.chaos
        return world
