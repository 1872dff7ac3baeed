# SPDX-License-Identifier: Apache-2.0
"""Times messages between nodes by TCP and by MPI, to find which are quicker.

The first ranks of the nodes send to and fro in pairs, by one way and by the other, as
Python can: its own time is the same for both. That takes some milliseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import socket
from typing import TYPE_CHECKING, Any, Protocol

from commrt.bootstrap.base import check_alive, poll_until, with_heed
from commrt.errors import TimeoutError_
from commrt.mpi.tags import PROBES
from commrt.tcp.connecting import Sockets

if TYPE_CHECKING:
    from commrt.bootstrap.mpi import MpiBootstrap

__all__ = ["Verdict", "compare_with_mpi", "mpi_round_us", "verdict_of"]

_SHORT_NBYTES, _LONG_NBYTES = 8, 64 << 10
"""Lengths of the messages. Longer ones Open MPI sends in another way; it would take
50 ms to time them on a slow network."""
_SHORT_ROUNDS, _LONG_ROUNDS = 10, 3
_LENGTHS = (
    ("short", _SHORT_NBYTES, _SHORT_ROUNDS),
    ("long", _LONG_NBYTES, _LONG_ROUNDS),
)
_NAMES = tuple(
    f"{way} {length}" for way in ("tcp", "mpi") for length in ("short", "long")
)


@dataclass(frozen=True)
class Verdict:
    """Says which way is quicker, and why."""

    is_tcp: bool
    why: str


def verdict_of(told: Sequence[dict[str, float]]) -> Verdict:
    """Return the verdict on what the ranks have timed, in microseconds.

    The slowest pair counts. TCP is quicker if the product of its times is less.
    """
    slowest = {name: max(one.get(name, 0.0) for one in told) for name in _NAMES}
    tcp_short, tcp_long, mpi_short, mpi_long = slowest.values()
    why = (
        f"8 B and 64 KiB, to and fro, take {tcp_short:.0f} and {tcp_long:.0f} us by "
        f"TCP, {mpi_short:.0f} and {mpi_long:.0f} us by MPI"
    )
    return Verdict(tcp_short * tcp_long < mpi_short * mpi_long, why)


def mpi_round_us(
    bootstrap: MpiBootstrap, leaders: Sequence[int], timeout_s: float
) -> float | None:
    """Return the time of 8 B to and fro by MPI; None unless this rank has begun it.

    Collective over the leaders, the first ranks of the nodes.
    """
    slowest: float | None = None
    for talk in _Talk.all_of(bootstrap, leaders, timeout_s):
        way = _ByMpi(bootstrap, talk.peer)
        took = min(talk.round_us(way, _SHORT_NBYTES) for _ in range(_SHORT_ROUNDS))
        if talk.leads:
            slowest = max(took, slowest or 0.0)
    return slowest


def compare_with_mpi(
    bootstrap: MpiBootstrap,
    leaders: Sequence[int],
    sockets: Sockets,
    patience_s: float,
    timeout_s: float,
) -> Verdict:
    """Return which way is quicker; the same on all ranks, and collective over them.

    A network may connect the ranks and still lose what they send. So TCP has only
    ``patience_s``, and MPI is the answer where that was not enough.
    """
    everybody = range(bootstrap.size)

    def told(key: str, mine: Any) -> list[Any]:
        blob = json.dumps(mine).encode()
        said = bootstrap.exchange(everybody, key, blob, timeout_s)
        return [json.loads(each) for each in said]

    by_tcp: dict[str, float] = {}
    why_not = ""
    try:
        for talk in _Talk.all_of(bootstrap, leaders, patience_s):
            took = talk.times_us(_BySocket(sockets[talk.peer][0]), "tcp")
            by_tcp = _slower(by_tcp, took if talk.leads else {})
    except (OSError, TimeoutError_) as error:
        why_not = str(error)
    for why in told("carrier/tcp", why_not):
        if why:
            return Verdict(False, why)
    by_mpi: dict[str, float] = {}
    for talk in _Talk.all_of(bootstrap, leaders, timeout_s):
        took = talk.times_us(_ByMpi(bootstrap, talk.peer), "mpi")
        by_mpi = _slower(by_mpi, took if talk.leads else {})
    return verdict_of(told("carrier/took", by_tcp | by_mpi))


def _slower(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: max(one.get(key, 0.0), other.get(key, 0.0)) for key in one | other}


class _Way(Protocol):
    """One way of messages to a peer; what its functions return says when they end."""

    def send(self, data: bytes) -> Callable[[], bool]: ...

    def receive(self, nbytes: int) -> Callable[[], bool]: ...


class _BySocket:
    """Messages over a connected socket, which waits for nothing."""

    def __init__(self, one: socket) -> None:
        self._socket = one

    def send(self, data: bytes) -> Callable[[], bool]:
        left = memoryview(data)

        def step() -> bool:
            nonlocal left
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                return False
            return not left

        return step

    def receive(self, nbytes: int) -> Callable[[], bool]:
        left = memoryview(bytearray(nbytes))

        def step() -> bool:
            nonlocal left
            try:
                came = self._socket.recv_into(left)
            except BlockingIOError:
                return False
            if came == 0:
                raise ConnectionResetError("the other end has closed it")
            left = left[came:]
            return not left

        return step


class _ByMpi:
    """Messages by MPI."""

    def __init__(self, bootstrap: MpiBootstrap, peer: int) -> None:
        from mpi4py import MPI

        self._byte = MPI.BYTE
        self._comm, self._place = bootstrap.comm, bootstrap.places[peer]

    def send(self, data: bytes) -> Callable[[], bool]:
        to = {"dest": self._place, "tag": _tag(len(data))}
        return _tested(self._comm.Isend([data, self._byte], **to), data)

    def receive(self, nbytes: int) -> Callable[[], bool]:
        by, into = {"source": self._place, "tag": _tag(nbytes)}, bytearray(nbytes)
        return _tested(self._comm.Irecv([into, self._byte], **by), into)


_OPEN: list[tuple[Any, Any]] = []
"""Requests of MPI's and their memory. Those that an error left behind stay: MPI may
still write there."""


def _tag(nbytes: int) -> int:
    return PROBES[nbytes > _SHORT_NBYTES]


def _tested(request: Any, memory: Any) -> Callable[[], bool]:
    one = request, memory
    _OPEN.append(one)

    def step() -> bool:
        if not request.Test():
            return False
        _OPEN.remove(one)
        return True

    return step


@dataclass(frozen=True)
class _Talk:
    """This rank's messages to and fro with another leader."""

    peer: int
    leads: bool
    """True if this rank begins."""
    wait: Callable[[Callable[[], bool]], None]

    @classmethod
    def all_of(
        cls, bootstrap: MpiBootstrap, leaders: Sequence[int], timeout_s: float
    ) -> list[_Talk]:
        """Return this rank's talks, one after the other; each leader has one at least.

        Leaders talk in pairs. Of an odd number the last talks with the first, whose
        own partner has finished then.
        """
        rank, last = bootstrap.rank, len(leaders) - 1
        if rank not in leaders or last == 0:
            return []
        at = leaders.index(rank)
        partners = [at ^ 1] if at ^ 1 <= last else []
        if last % 2 == 0 and at in (0, last):
            partners.append(last - at)
        return [
            cls._with(bootstrap, leaders[partner], timeout_s, leads=at < partner)
            for partner in partners
        ]

    @classmethod
    def _with(
        cls, bootstrap: MpiBootstrap, peer: int, timeout_s: float, *, leads: bool
    ) -> _Talk:
        rank = bootstrap.rank
        alive = check_alive(bootstrap.gone, "carrier", [peer], lambda _: False)
        idle = with_heed(bootstrap.idle, alive)

        def wait(step: Callable[[], bool]) -> None:
            if not poll_until(step, timeout_s, idle):
                raise TimeoutError_(
                    f"rank {rank}: rank {peer}, of another node, has not answered "
                    f"within {timeout_s:g} s"
                )

        return cls(peer, leads, wait)

    def round_us(self, way: _Way, nbytes: int) -> float:
        """Return the time of a message to and fro."""
        begun = time.perf_counter()
        if self.leads:
            self.wait(way.send(bytes(nbytes)))
        self.wait(way.receive(nbytes))
        if not self.leads:
            self.wait(way.send(bytes(nbytes)))
        return (time.perf_counter() - begun) * 1e6

    def times_us(self, way: _Way, name: str) -> dict[str, float]:
        """Return the least times of a way, by the names of ``verdict_of``."""
        found = {}
        for length, nbytes, rounds in _LENGTHS:
            took = [self.round_us(way, nbytes) for _ in range(rounds)]
            found[f"{name} {length}"] = min(took)
        return found
