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
from commrt.job.arena import machine_identity
from commrt.launch.rank_process import Process, is_running

__all__ = [
    "JobLiveness",
    "findable",
    "own_process",
    "watch_processes",
    "why_ended",
]

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


def findable() -> dict[str, str]:
    """Return how any process of the job can find this one, if it is on this machine."""
    return {**own_process(), "machine": machine_identity()}


def why_ended(its: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """Return why a process comes no more; empty where it runs, or may.

    ``its`` and ``mine``: what ``findable`` says of it, and of this process.
    """
    same = all(its[key] == mine[key] for key in ("machine", "space"))
    if not same or not its["process"] or is_running(its["process"]):
        return ""
    pid = its["process"].partition("-")[0]
    return f"process {pid} on {its['host']} has ended"


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
