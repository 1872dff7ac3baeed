# SPDX-License-Identifier: Apache-2.0
"""Ranks on pretended nodes whose frames go through sockets, as between real nodes."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from relay_ranks import Pair, RelayRanks

from commrt import _native
from commrt.bootstrap.base import poll_until

__all__ = ["CARRIERS", "RanksByTcp", "SocketCarrier"]

DEADLINE_S = 300.0


class SocketCarrier:
    """A pair of sockets for each pair of ranks on different nodes."""

    def __init__(self, relays: list[Any], pairs: list[Pair]) -> None:
        ends: list[list[tuple[int, int, int]]] = [[] for _ in relays]
        for a, b in pairs:
            if a < b:
                lanes = [socket.socketpair() for _ in range(2)]
                (a_1, a_2), (b_1, b_2) = zip(*lanes, strict=True)
                ends[a].append((b, a_1.detach(), a_2.detach()))
                ends[b].append((a, b_1.detach(), b_2.detach()))
        self.links = [
            _native.TcpLinks(relay, mine)
            for relay, mine in zip(relays, ends, strict=True)
        ]

    def join(self) -> None:
        """Wait for the last frames."""
        assert poll_until(lambda: not any(x.num_open for x in self.links), DEADLINE_S)


class RanksByTcp(RelayRanks):
    """RelayRanks whose frames the engine's own connections carry."""

    carrier_of = SocketCarrier


CARRIERS = [
    pytest.param(RelayRanks, id="by threads"),
    pytest.param(RanksByTcp, id="by TCP"),
]
"""Who carries frames between pretended nodes, as a parameter of tests."""
