# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads on pretended nodes, whose messages go through the native relay.

What gloo's threads do in ``commrt/gloo/relay.py`` is done here by threads of the test,
from memory to memory: no torch, no network.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any
from unittest import mock

from commrt import _native, local
from commrt.core import Core
from commrt.job.liveness import JobLiveness
from commrt.launch.detect import LaunchInfo
from commrt.local import LocalRanks
from commrt.runtime import open_world

__all__ = ["CarriedRelay", "RelayRanks"]

DEADLINE_S = 300.0
Pair = tuple[int, int]


class CarriedRelay:
    """One rank's relay, as a world has it."""

    is_staged = True
    """Its threads copy frames, as gloo does."""

    def __init__(self, rank: int, size: int) -> None:
        self.native = _native.Relay(rank, size)
        self.lost: set[int] = set()

    def ask(self, abouts: Mapping[int, int], tag: int) -> dict[int, Any]:
        """Ask the peers, and wait for the answers."""
        asked = {peer: self.native.ask(peer, tag, at) for peer, at in abouts.items()}
        told: dict[int, Any] = {}
        while len(told) < len(asked):
            for peer, question in asked.items():
                if peer not in told:
                    answer = self.native.answer(question)
                    told |= {} if answer is None else {peer: answer}
        return told

    def has_ended(self, peer: int) -> bool:
        """Whether the test has said so."""
        return bool(self.native.failure_of(peer))


class Carrier:
    """A thread for each ordered pair of ranks on different nodes."""

    def __init__(self, relays: list[Any], pairs: list[Pair]) -> None:
        self._relays = relays
        self._landing: dict[Pair, dict[int, int]] = {pair: {} for pair in pairs}
        self.frames = 0
        self.threads = [
            threading.Thread(target=self._carry, args=pair, daemon=True)
            for pair in pairs
        ]
        for thread in self.threads:
            thread.start()

    def _carry(self, source: int, dest: int) -> None:
        """Bring frames from one rank to another, each after its payload."""
        sender, receiver = self._relays[source], self._relays[dest]
        frame = (ctypes.c_uint8 * sender.frame_nbytes)()
        at = ctypes.addressof(frame)
        while todo := sender.next(dest, at):
            nbytes, payload, payload_nbytes, landing, _, where, ends = todo
            if landing:
                self._landing[source, dest][where] = landing
            if payload:
                to = self._landing[dest, source].pop(where)
                ctypes.memmove(to, payload, payload_nbytes)
                sender.sent(dest)
            if nbytes and (where := receiver.arrived(source, at, nbytes)) > 0:
                receiver.landed(source, where)
            if ends:
                return

    def join(self) -> None:
        """Wait for the last frames."""
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


class RelayRanks(LocalRanks):
    """LocalRanks on pretended nodes: between them messages go through relays."""

    carrier_of: Any = Carrier

    def __init__(
        self, nodes: list[list[int]], *, timeout_s: float = DEADLINE_S
    ) -> None:
        size = sum(map(len, nodes))
        self.nodes = nodes
        node = {rank: i for i, ranks in enumerate(nodes) for rank in ranks}
        self.relays = [CarriedRelay(rank, size) for rank in range(size)]
        names = [f"process {100 + rank} on node{node[rank]}" for rank in range(size)]
        lives = [JobLiveness(_native.Liveness([], names)) for _ in range(size)]
        for rank, relay in enumerate(self.relays):
            away = [peer for peer in range(size) if node[peer] != node[rank]]
            relay.native.watch(lives[rank].native, away)
        pairs = [(a, b) for a in range(size) for b in range(size) if node[a] != node[b]]
        self.carrier = self.carrier_of([each.native for each in self.relays], pairs)

        def connect(world: Any, rank: int, count: int, limit: float) -> Core:
            launch = LaunchInfo("single", rank, count, "threads of one process")
            mine = open_world(world.bootstrap(rank), launch, in_process=True)
            mine.timeout_s, mine.nodes = limit, nodes
            mine.relay = self.relays[rank]  # type: ignore[assignment]
            mine.liveness = lives[rank]
            identity = mine.agree_id(range(count), "world")
            return Core(mine, range(count), "local", identity)

        with mock.patch.object(local, "_connect", connect):
            super().__init__(size, timeout_s=timeout_s)

    def leave(self) -> None:
        """End all ranks' messages, in one order, as programs that end do."""
        for relay in self.relays:
            relay.native.leave()
        self.carrier.join()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        for relay in self.relays:
            for peer in range(len(self.relays)):
                if error is not None:
                    relay.native.lost(peer, "the test has failed")
        self.leave()
