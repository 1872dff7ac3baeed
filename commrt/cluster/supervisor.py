# SPDX-License-Identifier: Apache-2.0
"""The process in the background that holds a cluster with a name, until ``down``."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

from commrt.cluster.building import built_cluster
from commrt.cluster.failures import ClusterError
from commrt.cluster.state import claimed_name, find_cluster, write_entry
from commrt.cluster.wiring import Wiring
from commrt.errors import CommError

__all__ = ["bring_down", "bring_up"]

_READY = b"ready"
_LONGEST_NBYTES = 1 << 16
_END_S = 20.0
"""A supervisor ends in much less; after that it is killed."""


def bring_up(name: str, wiring: Wiring, folder: Path) -> None:
    """Build a cluster, and leave a process in the background that holds it.

    Raises:
        ClusterError: the name is taken, or this machine cannot make the cluster.
    """
    heard, says = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(heard)
        _detach(name, wiring, folder, says)
    os.close(says)
    os.waitpid(child, 0)
    said = os.read(heard, _LONGEST_NBYTES)
    os.close(heard)
    if said != _READY:
        reason = said.decode(errors="replace") or "its process was ended"
        raise ClusterError(f"cluster {name!r}: {reason}")


def bring_down(name: str, folder: Path) -> None:
    """End a cluster and all processes in it.

    Raises:
        ClusterError: there is no such cluster.
    """
    process = os.pidfd_open(find_cluster(name, folder).supervisor)
    try:
        # The pidfd is this supervisor's: it is alive, so nobody else has its number.
        find_cluster(name, folder)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        ended = select.poll()
        ended.register(process, select.POLLIN)
        if not ended.poll(_END_S * 1000):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            ended.poll()
    except ProcessLookupError:
        return
    finally:
        os.close(process)


def _detach(name: str, wiring: Wiring, folder: Path, says: int) -> None:
    """Go on in a process that no terminal and no parent ends."""
    try:
        os.setsid()
        if os.fork() == 0:
            _supervise(name, wiring, folder, says)
    finally:
        os._exit(0)


def _supervise(name: str, wiring: Wiring, folder: Path, says: int) -> None:
    watched = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir("/")
    try:
        with claimed_name(name, folder) as place, built_cluster(wiring) as cluster:
            write_entry(place, cluster)
            # Where nobody is there any more to be told, the cluster is given up.
            os.write(says, _READY)
            os.close(says)
            while True:
                found = signal.sigwaitinfo(watched)
                if found.si_signo != signal.SIGCHLD:
                    break
                if os.waitpid(cluster.first, os.WNOHANG)[0]:
                    break
    except (OSError, CommError) as error:
        with suppress(OSError):
            os.write(says, str(error).encode())
