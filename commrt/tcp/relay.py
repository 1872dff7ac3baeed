# SPDX-License-Identifier: Apache-2.0
"""Messages to ranks of other nodes by connections of commrt's own.

The engine hands messages to a relay in C++ (native/engine/relay.hpp), which sends and
receives by itself (native/engine/tcp_links.hpp). Nothing here runs meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from socket import socket
from typing import Any

from commrt import _native
from commrt.bootstrap.base import poll_until
from commrt.tcp.questions import ask_peers
from commrt.vocabulary.limits import NO_LIMIT_S

__all__ = ["TcpRelay", "close_relays"]

_GRACE_S = 5.0
"""Seconds that the end waits for sent messages to leave, and for peers' last frames."""

_MADE: list[TcpRelay] = []
"""Relays of this process's worlds that have not ended."""


def close_relays() -> None:
    """Close all relays of this process, at its end."""
    for relay in [*_MADE]:
        relay.close()


class TcpRelay:
    """One rank's messages to other nodes.

    Args:
        rank: this process's rank in the job.
        size: ranks of the job.
        sockets: connected ones, by rank and lane; they are this object's from now on.
        liveness: is told which peers are lost, and which leave.
    """

    is_staged = False
    """Messages are sent from where they lie, and received where they belong."""

    def __init__(
        self,
        rank: int,
        size: int,
        sockets: Mapping[int, tuple[socket, socket]],
        liveness: _native.Liveness,
    ) -> None:
        self.native = _native.Relay(rank, size)
        self.native.watch(liveness, [*sockets])
        ends = [
            (peer, frames.detach(), payloads.detach())
            for peer, (frames, payloads) in sockets.items()
        ]
        self._links = _native.TcpLinks(self.native, ends)
        self.at_end: list[Callable[[], None]] = []
        """Functions to call once nothing comes from any peer any more."""
        self._owner = os.getpid()
        # The garbage collector may call part() wherever a thread has it.
        self._lock = threading.RLock()
        self._has_left = False
        self._parting: threading.Thread | None = None
        _MADE.append(self)

    def ask(
        self, abouts: Mapping[int, int], tag: int
    ) -> dict[int, tuple[Any, ...] | None]:
        """Return what each peer says that a rank does (``ask_peers``)."""
        return ask_peers(self.native, abouts, tag)

    def ask_for_dumps(self) -> None:
        """Ask ranks of other nodes to write their last operations; wait for none."""
        self.native.ask_for_dumps()

    def has_ended(self, peer: int) -> bool:
        """Return whether nothing comes from this peer any more."""
        return bool(self.native.failure_of(peer))

    def close(self) -> None:
        """Send what there is, and tell the peers that it was all. Idempotent.

        A peer answers that soon, whatever its program does. A thread that outlived the
        interpreter would end the process with an error.
        """
        if os.getpid() != self._owner:
            return
        if self._leave():
            poll_until(self._is_over, _GRACE_S)
            self._end()
        elif self._parting is not None:
            poll_until(self._is_over, _GRACE_S)
            self._links.stop()
            self._parting.join()

    def part(self) -> None:
        """Tell the peers that it was all, and wait for nobody. Idempotent.

        Once they have answered, the connections end.
        """
        if os.getpid() != self._owner or not self._leave():
            return
        if self._is_over():
            self._end()
            return
        self._parting = threading.Thread(
            target=self._part, name="commrt-parting", daemon=True
        )
        self._parting.start()

    def _leave(self) -> bool:
        with self._lock:
            has_left, self._has_left = self._has_left, True
        if not has_left:
            self.native.leave()
        return not has_left

    def _is_over(self) -> bool:
        return self._links.num_open == 0

    def _part(self) -> None:
        poll_until(self._is_over, NO_LIMIT_S)
        self._end()

    def _end(self) -> None:
        self._links.stop()
        ends, self.at_end = self.at_end, []
        for end in ends:
            end()
        _MADE.remove(self)
