# SPDX-License-Identifier: Apache-2.0
"""The process that delays packets of links with a latency.

Such a link is cut in two cables. The relay takes each packet off one cable and puts it
on the other one, a fixed time later. Packets come as large as the
sender's kernel makes them, up to 64 KB, so that few of them need a system call.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from commrt.cluster.kernel import Timer

__all__ = ["Cut", "open_relay"]

_SOL_PACKET, _SO_RCVBUFFORCE = 263, 33
_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 15, 23
_EVERY_PROTOCOL = 3
_ROOM_NBYTES = 1 << 24
"""The kernel keeps so much of a cable while the relay does something else."""
_LARGEST_NBYTES = 68_000
_MOST_AT_ONCE = 64
"""Packets taken from one cable before others have their turn."""


@dataclass(frozen=True)
class Cut:
    """A link with a latency."""

    ends: tuple[str, str]
    """The interfaces that the relay joins."""
    latency_us: int


class _Direction:
    """Packets from one interface to another one."""

    def __init__(self, source: socket.socket, to: socket.socket, ns: int) -> None:
        self._source, self._to, self._delay_ns = source, to, ns
        self._waiting: deque[tuple[int, bytearray, int]] = deque()
        self._spare: list[bytearray] = []

    def take(self) -> None:
        """Take what has come."""
        for _ in range(_MOST_AT_ONCE):
            buffer = self._spare.pop() if self._spare else bytearray(_LARGEST_NBYTES)
            try:
                nbytes = self._source.recv_into(buffer)
            except OSError:  # nothing is there, or the other end is just being built
                self._spare.append(buffer)
                return
            due_ns = time.monotonic_ns() + self._delay_ns
            self._waiting.append((due_ns, buffer, nbytes))

    def pass_on(self, now_ns: int) -> int:
        """Send what is due; return when the next packet is, or 0."""
        while self._waiting:
            due_ns, buffer, nbytes = self._waiting[0]
            if due_ns > now_ns:
                return due_ns
            self._waiting.popleft()
            with suppress(OSError):  # a cable that is down loses packets
                self._to.send(memoryview(buffer)[:nbytes])
            self._spare.append(buffer)
        return 0


class _Relay:
    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._timer = Timer()
        self._events = select.epoll()
        self._events.register(self._timer.descriptor, select.EPOLLIN)
        self._directions: dict[int, _Direction] = {}
        for cut in cuts:
            one, other = map(_opened, cut.ends)
            for source, to in ((one, other), (other, one)):
                way = _Direction(source, to, cut.latency_us * 1000)
                self._directions[source.fileno()] = way
                self._events.register(source, select.EPOLLIN)

    def run(self) -> NoReturn:
        """Relay packets for ever."""
        armed_ns = 0
        while True:
            for descriptor, _ in self._events.poll():
                if descriptor in self._directions:
                    self._directions[descriptor].take()
                else:
                    self._timer.clear()
                    armed_ns = 0
            now_ns = time.monotonic_ns()
            due = [way.pass_on(now_ns) for way in self._directions.values()]
            next_ns = min((at for at in due if at), default=0)
            if next_ns and (not armed_ns or next_ns < armed_ns):
                armed_ns = next_ns
                self._timer.set(next_ns)


def open_relay(cuts: Sequence[Cut], says: int) -> NoReturn:
    """Relay packets of these links; never returns.

    Args:
        cuts: the links; their interfaces lie in this process's network namespace.
        says: the end for writing of a pipe that gets ``ok``, or why there is no relay.
    """
    try:
        relay = _Relay(cuts)
        with suppress(OSError):  # before programs: a late relay would be their network
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.write(says, b"ok")
        os.close(says)
        relay.run()
    except OSError as error:
        with suppress(OSError):
            os.write(says, str(error).encode())
    finally:
        os._exit(1)


def _opened(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM_NBYTES)
    made.bind((interface, _EVERY_PROTOCOL))
    return made
