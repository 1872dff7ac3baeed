# SPDX-License-Identifier: Apache-2.0
"""Connections of gloo's that no child of this process keeps open.

A forked child, such as a worker of a data loader, has a copy of each descriptor. The
kernel closes a connection with its last copy. So peers of a rank that was killed would
not see it as long as a child of it lives. Here children close their copies at once.

gloo does not tell its descriptors. They are found by its ports: each rank listens at
one, and each connection has one of these at one of its ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["ConnectionsMade"]

_LISTENS = "0A"
"""A state of /proc/net/tcp."""
_SHARED: dict[int, int] = {}
"""Children close these: descriptors, and the inodes of their sockets."""


@dataclass(frozen=True)
class _Socket:
    descriptor: int
    inode: int
    local_port: int
    remote_port: int
    listens: bool


class ConnectionsMade:
    """The connections that gloo makes from here on; nothing else makes any meanwhile.

    What another thread of the program connects is told from these by its ports.
    """

    def __init__(self) -> None:
        self._before = {each.inode for each in _open_sockets()}

    def own_ports(self) -> list[int]:
        """Return the ports at which gloo listens since."""
        return [each.local_port for each in self._new() if each.listens]

    def keep_from_children(self, ports: Iterable[int]) -> None:
        """Have all children close their copies; ``ports`` are those of all ranks."""
        everybody, own = {*ports}, {*self.own_ports()}
        _watch_forks()
        for each in self._new():
            if each.local_port in own or each.remote_port in everybody:
                os.set_inheritable(each.descriptor, False)
                _SHARED[each.descriptor] = each.inode

    def _new(self) -> list[_Socket]:
        return [each for each in _open_sockets() if each.inode not in self._before]


def _open_sockets() -> list[_Socket]:
    """Return this process's TCP sockets; none where /proc does not show them."""
    descriptors = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    descriptors[target[8:-1]] = int(name)
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, remote, state, *rest = line.split()
                if (inode := rest[5]) in descriptors:
                    found.append(
                        _Socket(
                            descriptors[inode],
                            int(inode),
                            _port_of(local),
                            _port_of(remote),
                            listens=state == _LISTENS,
                        )
                    )
    return found


def _port_of(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


@lru_cache(maxsize=1)
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_close_copies)


def _close_copies() -> None:
    for descriptor, inode in _SHARED.items():
        with contextlib.suppress(OSError):
            # The connection may have ended, and its number be another one's by now.
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
    _SHARED.clear()
