# SPDX-License-Identifier: Apache-2.0
"""Liveness: the processes of a node's ranks, which the kernel says have ended or not.

Ranks tell each other which process they are. Each opens a descriptor of the others'
processes, and asks it while it waits for them (``native/engine/liveness.hpp``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commrt import _native
from commrt.launch.rank_process import Process

__all__ = ["NodeLiveness", "own_process", "watch_processes"]

_UNKNOWN = -1


@dataclass(frozen=True)
class NodeLiveness:
    """The processes of a world's ranks on this node, and whether they still run."""

    native: _native.Liveness
    """Asks the kernel."""
    member_of: dict[int, int]
    """For each of these ranks of the world, its number among the members."""

    def of(self, world_ranks: Sequence[int]) -> list[int]:
        """Return the number of each rank, -1 for ranks of other nodes."""
        return [self.member_of.get(rank, -1) for rank in world_ranks]

    def gone(self, world_rank: int) -> str:
        """Return why a rank comes no more; empty where its process runs, or may."""
        member = self.member_of.get(world_rank, -1)
        if member < 0 or not self.native.look() or not self.native.has_ended(member):
            return ""
        return f"{self.native.name(member)} has ended"


def own_process() -> dict[str, str]:
    """Return how other ranks of this node can find this process."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    process = Process(os.getpid()).name if space else ""
    return {"process": process, "space": space, "host": socket.gethostname()}


def watch_processes(
    rank: int, known: Mapping[int, Mapping[str, str]]
) -> NodeLiveness | None:
    """Return what watches the processes of the ``known`` ranks; None where nothing can.

    ``known`` has the ``own_process`` of each rank of this node. A process of another
    space of process numbers (a container of its own) is not watched.
    """
    members = sorted(known)
    mine = known[rank]
    descriptors, names, numbers = [], [], []
    for member in members:
        its = known[member]
        pid = int(its["process"].partition("-")[0] or 0)
        watched = member != rank and its["space"] == mine["space"] and pid > 0
        descriptors.append(_open(pid, its["process"]) if watched else _UNKNOWN)
        names.append(f"process {pid} on {its['host']}")
        numbers.append(pid if descriptors[-1] != _UNKNOWN else 0)
    if all(descriptor == _UNKNOWN for descriptor in descriptors):
        return None
    native = _native.Liveness(descriptors, names, numbers)
    return NodeLiveness(native, {member: i for i, member in enumerate(members)})


def _open(pid: int, name: str) -> int:
    """Return a descriptor of a process, or -1 where there is none."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone already, or Linux below 5.3
        return _UNKNOWN
    if Process(pid).name != name:  # another process has its number by now
        os.close(descriptor)
        return _UNKNOWN
    return descriptor
