# SPDX-License-Identifier: Apache-2.0
"""Measures what a cluster's links carry, and whether cores were idle meanwhile.

Hosts share the cores of one machine. A rate is judged only where cores had time to
spare: else the cores are what was measured.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commrt.cluster.building import Cluster
from commrt.cluster.entering import enter_host
from commrt.cluster.failures import ClusterError
from commrt.cluster.routes import path
from commrt.errors import CommError
from commrt.vocabulary.link_rates import rate_text

__all__ = ["Found", "measure", "verdict"]

_OFF = 0.03
"""How far a measured rate may be from the one asked for."""
_IDLE = 0.2
"""Less idle time than this, and the cores are what was measured."""
_SKIPPED = 0.2
"""The part of a flow, at its begin, that is not counted."""
_ROUND_TRIPS, _FEWEST = 200, 5
_ROUND_TRIPS_US = 1_000_000
"""They take about so long together where links have a latency."""
_PIECE_NBYTES = 1 << 18
_LONGEST_NBYTES = 1 << 16
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Found:
    """The figures measured between two hosts."""

    pair: tuple[str, str]
    asked: int | None
    """Bits a second of the slowest link between them; None: unlimited."""
    data_share: float
    """The part of it that is left for data beside headers."""
    rate: float
    """Bits a second of data that came."""
    asked_us: int
    """Microseconds of a round trip by the latencies of links; 0: none are asked for."""
    round_trip_us: float
    idle: float
    """The part of the cores' time that nobody used."""

    @property
    def off(self) -> float | None:
        """How far the rate is from what the one asked for leaves for data."""
        if self.asked is None:
            return None
        return self.rate / (self.asked * self.data_share) - 1

    @property
    def judged(self) -> bool:
        """True if the cores had time to spare, and a rate was asked for."""
        return self.asked is not None and self.idle >= _IDLE

    @property
    def good(self) -> bool:
        """True unless a rate that can be judged is not kept."""
        return not self.judged or self.off is None or abs(self.off) <= _OFF

    def line(self) -> str:
        """Return a line of the table."""
        off = "" if self.off is None else f"{self.off:+.1%}"
        note = "" if self.good else "not kept"
        if self.asked is not None and not self.judged:
            note = "cores were busy: not judged"
        return (
            f"{'-'.join(self.pair):14} {rate_text(self.asked):>10} "
            f"{self.rate / 1e6:14.1f} {off:>7} {self.asked_us or '-':>9} "
            f"{self.round_trip_us:14.0f} {self.idle:11.0%}  {note}"
        ).rstrip()


def measure(cluster: Cluster, seconds: float) -> int:
    """Print a line for each host and the next one; return 1 if a rate is not kept.

    It runs in a process that ``run_inside`` has made.
    """
    hosts = cluster.wiring.topology.hosts
    if len(hosts) < 2:
        raise ClusterError("one host has nobody to send to; measure two or more")
    print(
        f"{'pair':14} {'asked':>10} {'Mbit/s of data':>14} {'off':>7} "
        f"{'asked, us':>9} {'round trip, us':>14} {'cores idle':>11}"
    )
    found = []
    for index, host in enumerate(hosts[: len(hosts) if len(hosts) > 2 else 1]):
        one = _measured(cluster, (host, hosts[(index + 1) % len(hosts)]), seconds)
        print(one.line(), flush=True)
        found.append(one)
    return verdict(found)


def verdict(found: list[Found]) -> int:
    """Return 1, and say so, if a rate is not kept though cores were idle."""
    bad = ["-".join(one.pair) for one in found if not one.good]
    if bad:
        print(
            f"commrt cluster: {', '.join(bad)}: the rate is more than {_OFF:.0%} off "
            f"while cores were idle",
            file=sys.stderr,
        )
    return 1 if bad else 0


def _measured(cluster: Cluster, pair: tuple[str, str], seconds: float) -> Found:
    """Send from the first host to the second one."""
    source, destination = pair
    address = cluster.wiring.address(destination)
    links = path(cluster.wiring.topology, *pair)
    back = path(cluster.wiring.topology, *pair[::-1])
    rates = [link.rate for link in links if link.rate is not None]
    asked_us = sum(link.latency_us for link in (*links, *back))
    trips = _ROUND_TRIPS
    if asked_us:
        trips = max(_FEWEST, min(trips, _ROUND_TRIPS_US // asked_us))
    server = _Helper(
        cluster.processes[destination], lambda say: _serve(address, trips, say)
    )
    port = int(server.said()["port"])
    client = _Helper(
        cluster.processes[source],
        lambda say: _send((address, port), trips, seconds, say),
    )
    round_trip = float(client.said()["round_trip_us"])
    before = _cores()
    rate = float(server.said()["rate"])
    after = _cores()
    client.join()
    server.join()
    total = max(1, after[0] - before[0])
    return Found(
        pair,
        min(rates) if rates else None,
        cluster.wiring.data_share,
        rate,
        asked_us,
        round_trip,
        (after[1] - before[1]) / total,
    )


def _serve(address: str, trips: int, say: Callable[..., None]) -> None:
    with socket.create_server((address, 0)) as server:
        server.settimeout(_LIMIT_S)
        say(port=server.getsockname()[1])
        peer, _ = server.accept()
        with peer:
            peer.settimeout(_LIMIT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(trips):
                peer.sendall(peer.recv(1))
            seconds = float(peer.recv(64).decode())
            peer.sendall(b".")
            say(rate=_received(peer, seconds * _SKIPPED))


def _received(peer: socket.socket, skipped_s: float) -> float:
    """Return bits a second that come until the peer closes."""
    buffer = bytearray(_PIECE_NBYTES)
    begin = time.monotonic()
    since, num = 0.0, 0
    last = begin
    while nbytes := peer.recv_into(buffer):
        last = time.monotonic()
        if since:
            num += nbytes
        elif last - begin >= skipped_s:
            since = last
    return num * 8 / (last - since) if last > since > 0 else 0.0


def _send(
    address: tuple[str, int], trips: int, seconds: float, say: Callable[..., None]
) -> None:
    with socket.create_connection(address, timeout=_LIMIT_S) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took = []
        for _ in range(trips):
            begin = time.perf_counter()
            peer.sendall(b".")
            peer.recv(1)
            took.append(time.perf_counter() - begin)
        peer.sendall(str(seconds).encode())
        peer.recv(1)
        say(round_trip_us=statistics.median(took) * 1e6)
        piece = bytes(_PIECE_NBYTES)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            peer.sendall(piece)


def _cores() -> tuple[int, int]:
    """Return the time that cores had so far, and the idle part of it, in ticks."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(word) for word in words]
    return sum(ticks), ticks[3] + ticks[4]


class _Helper:
    """A process on a host that runs a function and says what it finds."""

    def __init__(
        self, holder: int, function: Callable[[Callable[..., None]], None]
    ) -> None:
        self._heard, says = os.pipe()
        self._rest = b""
        self._pid = os.fork()
        if self._pid == 0:
            _help(holder, function, says)
        os.close(says)

    def said(self) -> dict[str, Any]:
        """Return the next thing that the process says."""
        while b"\n" not in self._rest:
            piece = os.read(self._heard, _LONGEST_NBYTES)
            if not piece:
                raise ClusterError("a host ended before it had measured")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise ClusterError(f"measuring failed: {said['error']}")
        return said

    def join(self) -> None:
        """Wait for the end of the process."""
        os.waitpid(self._pid, 0)
        os.close(self._heard)


def _help(
    holder: int, function: Callable[[Callable[..., None]], None], says: int
) -> None:
    def say(**what: object) -> None:
        os.write(says, json.dumps(what).encode() + b"\n")

    try:
        enter_host(holder)
        function(say)
    except (OSError, ValueError, CommError) as error:
        say(error=str(error))
    finally:
        os._exit(0)
