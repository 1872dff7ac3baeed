# SPDX-License-Identifier: Apache-2.0
"""A cluster that this process holds: it ends with this process, however that ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from commrt.cluster import kernel
from commrt.cluster.failures import ClusterError
from commrt.cluster.first_process import Built, run_first_process
from commrt.cluster.programs import check_programs, check_root
from commrt.cluster.wiring import Wiring

__all__ = ["Cluster", "built_cluster"]

_LONGEST_NBYTES = 1 << 16


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs."""

    wiring: Wiring
    first: int
    """Its first process, by its number here."""
    processes: dict[str, int]
    """The process that holds each host, by its number inside."""


@contextmanager
def built_cluster(wiring: Wiring) -> Iterator[Cluster]:
    """Yield a new cluster, and end it with all of its processes.

    This process may have one thread only. Its later children are in the cluster.

    Raises:
        ClusterError: this machine or this user cannot make one.
    """
    check_root()
    check_programs()
    alive, held = os.pipe()
    heard, report = os.pipe()
    try:
        kernel.unshare(kernel.NEW_PID)
    except OSError as error:
        raise ClusterError(f"no PID namespace can be made: {error}") from error
    first = os.fork()
    if first == 0:
        os.close(held)
        os.close(heard)
        run_first_process(wiring, alive, report)
    os.close(alive)
    os.close(report)
    process = os.pidfd_open(first)
    try:
        # One piece: it is short.
        built = Built.of(os.read(heard, _LONGEST_NBYTES))
        if built.error:
            raise ClusterError(f"the cluster could not be built: {built.error}")
        yield Cluster(wiring, first, built.processes)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        # It comes back when the last process of the cluster is gone.
        with suppress(ChildProcessError):
            os.waitpid(first, 0)
        for descriptor in (process, heard, held):
            os.close(descriptor)
