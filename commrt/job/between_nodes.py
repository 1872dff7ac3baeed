# SPDX-License-Identifier: Apache-2.0
"""Connections between nodes without MPI: commrt's own, or torch's gloo."""

from __future__ import annotations

import json
from collections.abc import Sequence

from commrt import _native, env
from commrt.bootstrap.base import Bootstrap
from commrt.errors import BackendError
from commrt.gloo.connecting import connect_group
from commrt.gloo.connections import ConnectionsMade
from commrt.gloo.relay import GlooRelay
from commrt.tcp.addresses import (
    address_for_gloo,
    have_torch,
    listening_address,
    own_addresses,
)
from commrt.tcp.connecting import connect_ranks
from commrt.tcp.relay import TcpRelay

__all__ = ["connect_nodes"]

_BY_GLOO = "gloo"
"""A value of COMMRT_CARRIER."""


def connect_nodes(
    bootstrap: Bootstrap,
    here: Sequence[int],
    liveness: _native.Liveness,
    limit_s: float,
) -> tuple[GlooRelay | TcpRelay, str | None]:
    """Connect the nodes, and return this rank's address for gloo; collective.

    The address is None where gloo's own collectives are not to be had.

    Args:
        bootstrap: exchanges small blobs among all ranks.
        here: the ranks of this node.
        liveness: is told which peers are lost, and which leave.
        limit_s: within which the ranks must find each other.
    """
    private_store = getattr(bootstrap, "private_store", None)
    if private_store is None:
        raise BackendError(
            "the ranks lie on several nodes, and between nodes commrt needs MPI or a "
            "store in which the ranks meet: start them with mpiexec and the extra "
            "commrt[mpi], with python -m commrt.run or with torchrun"
        )
    rank, size = bootstrap.rank, bootstrap.size
    everybody = range(size)
    away = [peer for peer in everybody if peer not in here]
    # The exchange names a rank that comes late; gloo would only say that time is up.
    own = own_addresses()
    said = bootstrap.exchange(everybody, "addresses", own, limit_s)
    address = address_for_gloo(own, said)
    if env.read_str("COMMRT_CARRIER") != _BY_GLOO:
        at = listening_address(own, said)
        sockets = connect_ranks(bootstrap, away, at, limit_s)
        relay = TcpRelay(rank, size, sockets, liveness)
        return relay, address if have_torch(said) else None
    store = private_store("gloo")
    made = ConnectionsMade()
    group = connect_group(store, everybody, bootstrap, limit_s, address)
    mine = json.dumps(made.own_ports()).encode()
    ports = bootstrap.exchange(everybody, "gloo/ports", mine, limit_s)
    made.keep_from_children(port for each in ports for port in json.loads(each))
    return GlooRelay(group, rank, size, away, liveness), address
