# SPDX-License-Identifier: Apache-2.0
"""Who carries messages between nodes: connections of commrt's own, gloo, or MPI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from commrt import _native, env
from commrt.bootstrap.base import Bootstrap
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.errors import BackendError, TimeoutError_
from commrt.gloo.connecting import connect_group
from commrt.gloo.connections import ConnectionsMade
from commrt.gloo.relay import GlooRelay
from commrt.job.arena import machine_identity, network_identity
from commrt.tcp.addresses import (
    address_for_gloo,
    have_torch,
    listening_address,
    own_addresses,
)
from commrt.tcp.beside_mpi import compare_with_mpi, mpi_round_us
from commrt.tcp.connecting import Sockets, connect_ranks
from commrt.tcp.relay import TcpRelay

__all__ = ["Carrier", "Side", "carrier_beside_mpi", "connect_nodes"]

_BY_GLOO, _BY_MPI, _BY_TCP = "gloo", "mpi", "tcp"
"""Values of COMMRT_CARRIER."""
_MOST_RANKS = 256
"""Most ranks that connect where nobody asks for it: each has two sockets for each rank
of other nodes, and 1,024 files are what a process may open by default."""
_TOO_QUICK_US = 8.0
"""Round trip of MPI's messages that no TCP connection gets near."""
_PATIENCE_S, _PART = 10.0, 0.25
"""Time for connections that are only tried, and its part of the limit: a firewall may
answer nothing at all, and the ranks are to hear of that in time."""


@dataclass(frozen=True)
class Carrier:
    """Carries the messages of one rank to other nodes."""

    relay: GlooRelay | TcpRelay | None
    """Carries them; None: MPI does."""
    why: str
    """Reason why it does, for people."""
    gloo_address: str | None = None
    """This rank's address for gloo; None where gloo's collectives are not to be had."""


@dataclass(frozen=True)
class Side:
    """One rank among the nodes."""

    bootstrap: Bootstrap
    """Exchanges small blobs among all ranks."""
    nodes: Sequence[Sequence[int]]
    """Ranks of each node."""
    liveness: _native.Liveness
    """Is told which peers are lost, and which leave."""
    limit_s: float
    """Time within which the ranks must find each other."""

    @property
    def everybody(self) -> range:
        """All ranks."""
        return range(self.bootstrap.size)

    @property
    def away(self) -> list[int]:
        """Ranks of other nodes."""
        here = next(ranks for ranks in self.nodes if self.bootstrap.rank in ranks)
        return [rank for rank in self.everybody if rank not in here]

    def tell_all(self, key: str, mine: bytes) -> list[bytes]:
        """Return what all ranks tell each other by a key."""
        return self.bootstrap.exchange(self.everybody, key, mine, self.limit_s)

    def relay_by_tcp(self, sockets: Sockets) -> TcpRelay:
        """Return what carries messages over connected sockets."""
        own = self.bootstrap
        return TcpRelay(own.rank, own.size, sockets, self.liveness)


def connect_nodes(side: Side) -> Carrier:
    """Connect the nodes of ranks that have met without MPI; collective."""
    bootstrap = side.bootstrap
    private_store = getattr(bootstrap, "private_store", None)
    if private_store is None:
        raise BackendError(
            "the ranks lie on several nodes, and between nodes commrt needs MPI or a "
            "store in which the ranks meet: start them with mpiexec and the extra "
            "commrt[mpi], with python -m commrt.run or with torchrun"
        )
    wanted = env.read_str("COMMRT_CARRIER")
    if wanted == _BY_MPI:
        raise BackendError(
            "COMMRT_CARRIER=mpi, and these ranks were not started by MPI: start them "
            "with mpiexec, or unset it"
        )
    # The exchange names a rank that comes late; gloo would only say that time is up.
    own = own_addresses()
    said = side.tell_all("addresses", own)
    address = address_for_gloo(own, said)
    if wanted != _BY_GLOO:
        at = _own_address(own, said)
        sockets = connect_ranks(bootstrap, side.away, at, side.limit_s)
        why = "the ranks have met without MPI"
        relay = side.relay_by_tcp(sockets)
        return Carrier(relay, why, address if have_torch(said) else None)
    store = private_store("gloo")
    made = ConnectionsMade()
    group = connect_group(store, side.everybody, bootstrap, side.limit_s, address)
    ports = side.tell_all("gloo/ports", json.dumps(made.own_ports()).encode())
    made.keep_from_children(port for each in ports for port in json.loads(each))
    ends = bootstrap.rank, bootstrap.size, side.away, side.liveness
    return Carrier(GlooRelay(group, *ends), "COMMRT_CARRIER=gloo", address)


def carrier_beside_mpi(side: Side, pretended: bool) -> Carrier:
    """Return who carries messages of ranks that MPI started; collective.

    Unless COMMRT_CARRIER says who, the ranks connect, and time a short and a long
    message over both ways. Nobody connects where MPI's are far too quick for that.

    Args:
        side: one rank among the nodes.
        pretended: whether the nodes are parts of one, as COMMRT_NODES says.
    """
    wanted = env.read_str("COMMRT_CARRIER")
    if wanted == _BY_GLOO:
        raise BackendError(
            "COMMRT_CARRIER=gloo needs a store in which the ranks meet, and MPI "
            "started these: start them with torchrun or python -m commrt.run, or unset "
            "it"
        )
    if wanted == _BY_MPI:
        return Carrier(None, "COMMRT_CARRIER=mpi")
    own = own_addresses()
    if wanted == _BY_TCP:
        at = _own_address(own, side.tell_all("addresses", own))
        sockets = connect_ranks(side.bootstrap, side.away, at, side.limit_s)
        return Carrier(side.relay_by_tcp(sockets), "COMMRT_CARRIER=tcp")
    size = side.bootstrap.size
    if pretended:
        return Carrier(None, "the nodes are parts of one")
    if size > _MOST_RANKS:
        return Carrier(None, f"{size} ranks, and only {_MOST_RANKS} connect unasked")
    return _quicker(side, own)


def _quicker(side: Side, own: bytes) -> Carrier:
    """Return the carrier whose messages are quicker; MPI where none connects."""
    assert isinstance(side.bootstrap, MpiBootstrap)
    leaders = [ranks[0] for ranks in side.nodes]
    by_mpi = mpi_round_us(side.bootstrap, leaders, side.limit_s)
    facts = json.dumps([by_mpi, machine_identity(), network_identity()]).encode()
    told = [json.loads(each) for each in side.tell_all("carrier", facts)]
    least_us = min((us for us, *_ in told if us is not None), default=0.0)
    if least_us < _TOO_QUICK_US:
        return Carrier(None, f"its round trip is {least_us:.1f} us")
    if len({(machine, network) for _, machine, network in told}) == 1:
        return Carrier(None, "all nodes are in one network namespace")
    at = _own_address(own, side.tell_all("addresses", own))
    sockets: Sockets = {}
    why_none = ""
    patience_s = min(_PATIENCE_S, _PART * side.limit_s)
    try:
        sockets = connect_ranks(side.bootstrap, side.away, at, patience_s)
    except (BackendError, TimeoutError_, OSError) as error:
        why_none = str(error)
    whys = [each.decode() for each in side.tell_all("carrier/made", why_none.encode())]
    try:
        if any(whys):
            return Carrier(None, next(filter(None, whys)))
        verdict = compare_with_mpi(
            side.bootstrap, leaders, sockets, patience_s, side.limit_s
        )
        if verdict.is_tcp:
            return Carrier(side.relay_by_tcp(_taken(sockets)), verdict.why)
        return Carrier(None, verdict.why)
    finally:
        for lanes in sockets.values():
            for each in lanes:
                each.close()


def _own_address(own: bytes, said: Sequence[bytes]) -> str | BackendError:
    """Return the address at which this rank listens, or why it has none.

    It would be the only one to raise the error: the others would wait for it.
    """
    try:
        return listening_address(own, said)
    except BackendError as error:
        return error


def _taken(sockets: Sockets) -> Sockets:
    """Return the sockets for another owner, and leave none here."""
    taken = dict(sockets)
    sockets.clear()
    return taken
