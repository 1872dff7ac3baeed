# SPDX-License-Identifier: Apache-2.0
"""Connects each pair of ranks of different nodes by TCP, once for each lane.

Each rank listens while the others connect, at one address and a port that the kernel
picks. The ranks tell each other both, and a secret each, through the bootstrap. Both
ends of a connection show that they know the other one's secret. So a stranger who
connects is turned away.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from commrt.bootstrap.base import Bootstrap, check_alive, poll_until, with_heed
from commrt.errors import BackendError, TimeoutError_

__all__ = ["Sockets", "connect_ranks"]

Sockets = dict[int, tuple[socket.socket, socket.socket]]
"""Connected ones of a rank, by peer and lane."""

_LANES = range(2)
"""Connections of a pair: for frames, and for payloads (native/engine/relay.hpp)."""

_MAGIC = b"commrt/1"
_WHO_NBYTES = 5
"""A rank and a lane."""
_PROOF_NBYTES = 32
_HELLO_NBYTES = len(_MAGIC) + _WHO_NBYTES + _PROOF_NBYTES
_End = tuple[int, int]
"""A rank and a lane."""
_ADVICE = "GLOO_SOCKET_IFNAME names the network interface to use"


@dataclass(frozen=True)
class _Place:
    """How to reach a rank."""

    host: str
    port: int
    secret: str
    why_none: str = ""
    """Why it cannot be reached at all; empty: it can."""

    def proof(self, said: bytes) -> bytes:
        """Return what shows this rank that who says so is of the job."""
        return hmac.new(self.secret.encode(), said, hashlib.sha256).digest()


def connect_ranks(
    bootstrap: Bootstrap,
    away: Sequence[int],
    own: str | BackendError,
    timeout_s: float,
) -> Sockets:
    """Return connected sockets to each rank of another node, by lane; collective.

    Args:
        bootstrap: exchanges small blobs among all ranks, and knows who is gone.
        away: the ranks of other nodes.
        own: the address at which this rank listens, or why it has none.
        timeout_s: within which the ranks must find each other.

    Raises BackendError where the network does not connect them; on all ranks where one
    cannot listen. Raises TimeoutError_ where a rank does not come, and PeerFailedError
    where one has ended.
    """
    everybody = range(bootstrap.size)
    listener, place = _listening(bootstrap.rank, own, len(away) + 16)
    with listener or contextlib.nullcontext():
        mine = json.dumps(astuple(place)).encode()
        said = bootstrap.exchange(everybody, "tcp/place", mine, timeout_s)
        places = [_Place(*json.loads(each)) for each in said]
        for each in places:
            if each.why_none:
                raise BackendError(each.why_none)
        assert listener is not None
        connecting = _Connecting(bootstrap.rank, places, away, listener)
        heed = check_alive(bootstrap.gone, "tcp", everybody, connecting.has_made)
        try:
            connecting.begin()
            idle = with_heed(bootstrap.idle, heed)
            if not poll_until(connecting.advance, timeout_s, idle):
                missing = [rank for rank in away if not connecting.has_made(rank)]
                raise TimeoutError_(
                    f"rank {bootstrap.rank} at {own}: no connection with ranks "
                    f"{missing} within {timeout_s:g} s; {_ADVICE}"
                )
        except BaseException:
            connecting.close_all()
            raise
        finally:
            connecting.close_others()
        made = connecting.made
        return {peer: (made[peer, 0], made[peer, 1]) for peer in away}


def _listening(
    rank: int, own: str | BackendError, most_waiting: int
) -> tuple[socket.socket | None, _Place]:
    """Return what listens, if it can, and its place."""
    if isinstance(own, BackendError):
        return None, _Place("", 0, "", f"rank {rank}: {own}")
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    try:
        made = socket.create_server((own, 0), family=family, backlog=most_waiting)
    except OSError as error:
        why = error.strerror or str(error)
        told = f"rank {rank} cannot listen at {own}: {why}; {_ADVICE}"
        return None, _Place(own, 0, "", told)
    return made, _Place(own, made.getsockname()[1], secrets.token_hex(16))


def _who(rank: int, lane: int) -> bytes:
    return rank.to_bytes(_WHO_NBYTES - 1, "big") + bytes([lane])


@dataclass
class _Talk:
    """A connection whose ends show each other who they are."""

    socket: socket.socket
    end: _End | None
    """The rank and lane that it leads to; None: it has come, and has not said."""
    to_send: bytes = b""
    heard: bytearray = field(default_factory=bytearray)


class _Connecting:
    """This rank's connections, as far as they have got.

    The higher rank of a pair connects, and the lower one accepts.
    """

    def __init__(
        self,
        rank: int,
        places: Sequence[_Place],
        away: Sequence[int],
        listener: socket.socket,
    ) -> None:
        self.made: dict[_End, socket.socket] = {}
        self._rank, self._places = rank, places
        self._wanted = {(peer, lane) for peer in away for lane in _LANES}
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def begin(self) -> None:
        """Connect with the lower ranks; nothing waits for them here."""
        for peer, lane in sorted(self._wanted):
            if peer < self._rank:
                self._connect(peer, lane)

    def has_made(self, peer: int) -> bool:
        """Return whether all connections with a rank are there."""
        return all((peer, lane) in self.made for lane in _LANES)

    def advance(self) -> bool:
        """Do what can be done at once; return whether all ranks are connected."""
        for key, events in self._selector.select(0):
            if key.data is None:
                self._accept()
                continue
            talk: _Talk = key.data
            try:
                if talk.to_send and events & selectors.EVENT_WRITE:
                    self._say(talk)
                if events & selectors.EVENT_READ:
                    self._hear(talk)
            except OSError as error:
                self._fail(talk, error.strerror or str(error))
        return {*self.made} == self._wanted

    def close_others(self) -> None:
        """Close what has led to no rank."""
        for key in [*self._selector.get_map().values()]:
            if key.data is not None:
                key.data.socket.close()
        self._selector.close()

    def close_all(self) -> None:
        """Close the connections that are made."""
        for one in self.made.values():
            one.close()

    def _connect(self, peer: int, lane: int) -> None:
        place = self._places[peer]
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        talk = _Talk(made, (peer, lane))
        try:
            made.connect((place.host, place.port))
        except BlockingIOError:
            pass
        except OSError as error:
            made.close()
            self._fail(talk, error.strerror or str(error))
        who = _who(self._rank, lane)
        talk.to_send = _MAGIC + who + place.proof(who)
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.register(made, both, talk)

    def _accept(self) -> None:
        try:
            made, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        made.setblocking(False)
        self._selector.register(made, selectors.EVENT_READ, _Talk(made, None))

    def _say(self, talk: _Talk) -> None:
        talk.to_send = talk.to_send[talk.socket.send(talk.to_send) :]
        if not talk.to_send:
            self._selector.modify(talk.socket, selectors.EVENT_READ, talk)
            if talk.end is not None and talk.end[0] > self._rank:
                self._finish(talk)

    def _hear(self, talk: _Talk) -> None:
        wanted = _HELLO_NBYTES if talk.end is None else _PROOF_NBYTES
        came = talk.socket.recv(wanted - len(talk.heard))
        if not came:
            return self._fail(talk, "the other end has closed it")
        talk.heard += came
        if len(talk.heard) < wanted:
            return None
        said = bytes(talk.heard)
        own = self._places[self._rank]
        if talk.end is None:
            who, proof = said[len(_MAGIC) : -_PROOF_NBYTES], said[-_PROOF_NBYTES:]
            end = int.from_bytes(who[:-1], "big"), who[-1]
            is_known = said.startswith(_MAGIC) and end in self._wanted - {*self.made}
            if not is_known or not hmac.compare_digest(proof, own.proof(who)):
                return self._fail(talk, "a stranger")
            talk.end = end
            answer = self._places[end[0]].proof(_who(self._rank, end[1]))
            talk.to_send = answer
            return self._say(talk)
        if not hmac.compare_digest(said, own.proof(_who(*talk.end))):
            return self._fail(talk, "another process listens there")
        return self._finish(talk)

    def _finish(self, talk: _Talk) -> None:
        assert talk.end is not None
        self._selector.unregister(talk.socket)
        talk.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.made[talk.end] = talk.socket

    def _fail(self, talk: _Talk, why: str) -> None:
        """End a connection: an error where this rank has made it."""
        if talk.socket.fileno() >= 0:
            if talk.socket in self._selector.get_map():
                self._selector.unregister(talk.socket)
            talk.socket.close()
        if talk.end is None or talk.end[0] > self._rank:
            return  # whoever it was may come again
        peer, _ = talk.end
        place = self._places[peer]
        raise BackendError(
            f"rank {self._rank} cannot connect with rank {peer}, of another node, "
            f"at {place.host} port {place.port}: {why}; {_ADVICE}"
        )
