# SPDX-License-Identifier: Apache-2.0
"""Liveness: which ranks of a job are gone, and how this process knows.

Ranks tell each other which process they are. A rank opens a descriptor of each process
of its node, and asks the kernel while it waits; one in another space of process numbers
hands it a descriptor of itself. Of ranks of other nodes it hears by the
connection that carries their messages (``native/engine/liveness.hpp``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commrt import _native
from commrt.bootstrap.base import Bootstrap
from commrt.job.arena import machine_identity
from commrt.job.passed_descriptors import DescriptorServer, receive_descriptor
from commrt.launch.rank_process import Process, is_running

__all__ = [
    "JobLiveness",
    "findable",
    "own_process",
    "watch_processes",
    "watch_seen",
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
    bootstrap: Bootstrap,
    here: Sequence[int],
    known: Sequence[Mapping[str, str]],
    timeout_s: float,
) -> JobLiveness:
    """Return what knows which ranks are gone; collective over the ranks of a node.

    Args:
        bootstrap: of the world's ranks.
        here: the ranks of this node.
        known: the ``own_process`` of each rank of the world.
        timeout_s: limit of the wait for other ranks.
    """
    mine = known[bootstrap.rank]
    passed: dict[int, int] = {}
    if len({known[rank]["space"] for rank in here}) > 1:
        foreign = [rank for rank in here if known[rank]["space"] != mine["space"]]
        passed = _pass_own_processes(bootstrap, here, foreign, timeout_s)
    return watch_seen(bootstrap.rank, here, known, passed)


def watch_seen(
    rank: int,
    here: Sequence[int],
    known: Sequence[Mapping[str, str]],
    passed: Mapping[int, int] | None = None,
) -> JobLiveness:
    """Return what knows which ranks are gone, of those that this process sees; local.

    As ``watch_processes``; ``passed`` has descriptors of others, by their ranks.
    """
    mine = known[rank]
    descriptors, names, numbers = [], [], []
    for other, its in enumerate(known):
        number = its["process"].partition("-")[0]
        is_seen = its["space"] == mine["space"] and number.isdecimal()
        asked = other in here and other != rank
        found = _open(int(number), its["process"]) if asked and is_seen else _UNKNOWN
        descriptors.append((passed or {}).get(other, found))
        names.append(f"process {number or 'of unknown number'} on {its['host']}")
        numbers.append(int(number) if found != _UNKNOWN else 0)
    return JobLiveness(_native.Liveness(descriptors, names, numbers))


def _pass_own_processes(
    bootstrap: Bootstrap, here: Sequence[int], foreign: Sequence[int], timeout_s: float
) -> dict[int, int]:
    """Return descriptors of processes in other spaces, as those hand them out.

    A process of another space, such as a container of its own, has no number here.
    """
    server, mine = None, -1
    told, descriptors = ["", ""], {}
    with contextlib.suppress(OSError, AttributeError):
        mine = os.pidfd_open(os.getpid())
        server = DescriptorServer(mine)
        told = [server.name, server.token]
    try:
        blob = json.dumps(told).encode()
        said = bootstrap.exchange(here, "processes/offer", blob, timeout_s)
        for rank, text in zip(here, said, strict=True):
            name, token = json.loads(text)
            if rank in foreign and name:
                with contextlib.suppress(OSError):  # of another network, too
                    descriptors[rank] = receive_descriptor(name, token, timeout_s)
        bootstrap.exchange(here, "processes/taken", b"", timeout_s)
    except BaseException:
        for descriptor in descriptors.values():
            os.close(descriptor)
        raise
    finally:
        if server is not None:
            server.close()
        if mine >= 0:
            os.close(mine)
    return descriptors


def _open(pid: int, name: str) -> int:
    """Return a descriptor of a process, or -1 where none can be had.

    Of one that has ended already, the descriptor is readable, as its own would be.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return os.eventfd(1)
    except (OSError, AttributeError):  # Linux below 5.3, or no descriptor is left
        return _UNKNOWN
    # Empty: it ends now, of which its descriptor tells.
    if Process(pid).name not in (name, ""):  # another process has its number by now
        os.close(descriptor)
        return os.eventfd(1)
    return descriptor
