# SPDX-License-Identifier: Apache-2.0
"""Liveness: which ranks of a job are gone, and how this process knows.

Ranks tell each other which process they are. A rank opens a descriptor of each process
of its node, and asks the kernel while it waits. Of ranks of other nodes it hears by the
connection that carries their messages (``native/engine/liveness.hpp``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commrt import _native
from commrt.launch.rank_process import Process

__all__ = ["JobLiveness", "own_process", "watch_processes"]

_UNKNOWN = -1


@dataclass(frozen=True)
class JobLiveness:
    """What is known of the processes of a world's ranks."""

    native: _native.Liveness
    """Asks the kernel, and is told by others. Its members are the world's ranks."""

    def gone(self, world_rank: int) -> str:
        """Return why a rank comes no more; empty where its process runs, or may."""
        return self.native.how(world_rank) if self.native.look() else ""


def own_process() -> dict[str, str]:
    """Return how other ranks of this node can find this process."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    process = Process(os.getpid()).name if space else ""
    return {"process": process, "space": space, "host": socket.gethostname()}


def watch_processes(
    rank: int, here: Sequence[int], known: Sequence[Mapping[str, str]]
) -> JobLiveness:
    """Return what knows which ranks are gone.

    Args:
        rank: this process's.
        here: the ranks of its node.
        known: the ``own_process`` of each rank of the world.
    """
    mine = known[rank]
    descriptors, names = [], []
    for member, its in enumerate(known):
        number = its["process"].partition("-")[0]
        asked = member in here and member != rank and its["space"] == mine["space"]
        is_known = asked and number.isdecimal()
        descriptors.append(_open(int(number), its["process"]) if is_known else _UNKNOWN)
        names.append(f"process {number or 'of unknown number'} on {its['host']}")
    return JobLiveness(_native.Liveness(descriptors, names))


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
