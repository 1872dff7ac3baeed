# SPDX-License-Identifier: Apache-2.0
"""The first process of a cluster: when it ends, the kernel ends all others of it.

It is the first one of a PID namespace and holds the switches. It ends when its parent
does, however that ends. The namespaces have no names, so nothing is left then.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from commrt.cluster import kernel
from commrt.cluster.failures import ClusterError
from commrt.cluster.host import furnish, separate, write_agent
from commrt.cluster.programs import run_batch
from commrt.cluster.relay import Cut, open_relay
from commrt.cluster.wiring import Wiring
from commrt.errors import CommError
from commrt.files.write import write_file

__all__ = ["Built", "run_first_process"]

_LONGEST_NBYTES = 1 << 20
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Built:
    """The first process's words once all hosts are there."""

    processes: dict[str, int]
    """The process that holds each host, by its number inside the cluster."""
    error: str = ""
    """Why there is no cluster; empty if there is one."""

    @classmethod
    def of(cls, said: bytes) -> Built:
        """Return what was said; an error if nothing was."""
        if not said:
            return cls({}, "its first process was ended while the cluster was built")
        return cls(**json.loads(said))


def run_first_process(wiring: Wiring, alive: int, report: int) -> NoReturn:
    """Build the cluster, say so, and stay; never returns.

    Args:
        wiring: the network.
        alive: a pipe whose other end the parent alone holds.
        report: the end for writing of a pipe that gets a ``Built``.
    """
    try:
        # Its end is the end of all: no key of a terminal does that by accident.
        os.setsid()
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        kernel.end_with_parent(alive)
        processes = _build(wiring)
        needed = {*processes.values(), *_start_relay(wiring.cuts())}
        _say(report, processes=processes)
        os.close(report)
        # A host or relay that is gone ends the cluster. Orphans of programs end here.
        while os.waitpid(-1, 0)[0] not in needed:
            pass
    except (OSError, CommError) as error:
        _say(report, processes={}, error=str(error))
    finally:
        os._exit(1)


def _build(wiring: Wiring) -> dict[str, int]:
    kernel.unshare(kernel.NEW_MOUNT | kernel.NEW_NETWORK)
    kernel.make_mounts_private()
    kernel.mount("proc", "/proc")
    with suppress(OSError):  # of a kernel without IPv6
        write_file("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
    waiting = {host: _Holder(wiring, host) for host in wiring.topology.hosts}
    processes = {host: one.pid for host, one in waiting.items()}
    for one in waiting.values():
        one.check("its namespaces could not be made")
    namespaces = {host: f"/proc/{pid}/ns/net" for host, pid in processes.items()}
    run_batch("ip", wiring.cables(namespaces))
    run_batch("bridge", wiring.tables())
    run_batch("tc", wiring.switch_rates())
    for one in waiting.values():
        one.go_on(processes)
    for one in waiting.values():
        one.check("it could not be furnished")
        one.close()
    return processes


def _start_relay(cuts: Sequence[Cut]) -> list[int]:
    """Return the process that delays packets, if there are links with a latency."""
    if not cuts:
        return []
    heard, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        open_relay(cuts, says)
    os.close(says)
    said = os.read(heard, _LONGEST_NBYTES)
    os.close(heard)
    if said != b"ok":
        reason = said.decode(errors="replace") or "its process was ended"
        raise ClusterError(f"no packets can be delayed: {reason}")
    return [pid]


class _Holder:
    """The process of one host, as the first process sees it."""

    def __init__(self, wiring: Wiring, host: str) -> None:
        self._host = host
        told, self._tell = os.pipe()
        self._heard, says = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._tell)
            os.close(self._heard)
            _hold(wiring, host, told, says)
        os.close(told)
        os.close(says)

    def check(self, what: str) -> None:
        """Wait for the next word of the process; raise ClusterError if it is bad."""
        said = os.read(self._heard, _LONGEST_NBYTES)
        if said != b"ok":
            reason = said.decode(errors="replace") or "its process was ended"
            raise ClusterError(f"host {self._host}: {what}: {reason}")

    def go_on(self, processes: dict[str, int]) -> None:
        """Tell the process that its cable has been laid."""
        os.write(self._tell, json.dumps(processes).encode())

    def close(self) -> None:
        """Close the pipes."""
        os.close(self._tell)
        os.close(self._heard)


def _hold(wiring: Wiring, host: str, told: int, says: int) -> NoReturn:
    """Be a host: never returns."""
    try:
        separate()
        os.write(says, b"ok")
        processes = json.loads(os.read(told, _LONGEST_NBYTES))
        furnish(wiring, host)
        write_agent(processes)
        os.write(says, b"ok")
        os.close(told)
        os.close(says)
        while True:
            signal.pause()
    except (OSError, ValueError, CommError) as error:
        os.write(says, str(error).encode())
    finally:
        os._exit(1)


def _say(report: int, **said: Any) -> None:
    os.write(report, json.dumps(said).encode())
