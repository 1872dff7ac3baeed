# SPDX-License-Identifier: Apache-2.0
"""Questions to ranks of other nodes, what they do, where MPI carries the messages.

MPI answers nobody while a program computes. So each process has a socket for datagrams,
and a thread that waits there and answers. Nothing is sent unless a rank asks, which it
does when its deadline has passed. Datagrams may be lost: a rank asks again until it has
an answer, for a second.

Ranks tell each other the addresses of their sockets when they start. A question shows
a secret number that the asked rank has told, so that nobody else is answered.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commrt import _native
from commrt.job.arena import machine_identity

__all__ = ["Inquiries", "Place", "close_inquiries"]

_MOST_NBYTES = 4096
"""Longest datagram that is looked at."""
_LIMIT_S = 1.0
"""Seconds that a rank has for its answer."""
_AGAIN_S = 0.1
"""Seconds until a question is sent again."""
_DUMP = -1
"""Stands for a rank in a question that asks for a dump."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Place:
    """Where a rank can be asked."""

    port: int
    """Port of its socket; 0: it has none."""
    addresses: tuple[str, ...]
    """Addresses of its machine."""
    machine: str
    """Names its machine."""
    secret: str
    """Number that questions to it show."""

    @property
    def text(self) -> str:
        """The place as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place that a rank has told."""
        said = json.loads(text)
        return cls(**{**said, "addresses": (*said["addresses"],)})


_OPEN: list[Inquiries] = []


def close_inquiries() -> None:
    """End all answers of this process, at its end."""
    for one in [*_OPEN]:
        one.close()


class Inquiries:
    """Asks ranks of other nodes, and answers them.

    Args:
        rank: this process's rank in the job.
        size: ranks of the job.
        liveness: knows which processes are gone or stopped; None: nobody does.
        families: kinds of sockets, the best one first; tests pass others.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        liveness: _native.Liveness | None = None,
        families: Sequence[socket.AddressFamily] = (socket.AF_INET6, socket.AF_INET),
    ) -> None:
        self.told = _native.ToldByTag(rank, size)
        """Has this rank's words of each communicator."""
        self._rank = rank
        self._liveness = liveness
        if liveness is not None:
            self.told.watch(liveness)
        self._places: Sequence[Place] = ()
        self._secret = secrets.token_hex(16)
        self._owner = os.getpid()
        self._families = families
        self._socket, self._wake = _opened(families), os.eventfd(0)
        self._thread: threading.Thread | None = None
        if self._socket is not None:
            self._socket.setblocking(False)
            self._thread = threading.Thread(
                target=self._serve, name="commrt-inquiries", daemon=True
            )
            self._thread.start()
        _OPEN.append(self)

    @property
    def place(self) -> Place:
        """Where the other ranks can ask this one."""
        port = 0 if self._socket is None else int(self._socket.getsockname()[1])
        addresses = (*_native.own_addresses(),)
        return Place(port, addresses, machine_identity(), self._secret)

    def connect(self, places: Sequence[Place]) -> None:
        """Take note of the places of all ranks of the job."""
        self._places = places

    def ask(self, abouts: Mapping[int, int], tag: int) -> dict[int, Row | None]:
        """Return what each peer says that a rank does on a communicator.

        ``abouts``: for each peer the rank, itself or another one of its node. The
        answers are rows as ``_native.rank_states`` has them. An empty one: it knows no
        such communicator. None: it has not answered within a second.
        """
        living = {at: about for at, about in abouts.items() if not self.has_ended(at)}
        return {**dict.fromkeys(abouts), **self._answers(living, tag)}

    def ask_for_dumps(self, peers: Sequence[int]) -> None:
        """Ask ranks of other nodes to write their last operations."""
        living = [peer for peer in peers if not self.has_ended(peer)]
        self._answers(dict.fromkeys(living, _DUMP), 0)

    def has_ended(self, peer: int) -> bool:
        """Return whether the process of a peer is known to have ended."""
        return self._liveness is not None and self._liveness.has_ended(peer)

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        if self not in _OPEN or os.getpid() != self._owner:
            return
        _OPEN.remove(self)
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            if self._thread is not threading.current_thread():  # collects garbage
                self._thread.join()
        if self._socket is not None:
            self._socket.close()
        os.close(self._wake)

    # -- asking ------------------------------------------------------------------

    def _answers(self, abouts: Mapping[int, int], tag: int) -> dict[int, Row]:
        found: dict[int, Row] = {}
        asking = _opened(self._families) if self._places and abouts else None
        if asking is None:
            return found
        number = secrets.token_hex(8)
        deadline, again_s = time.monotonic() + _LIMIT_S, 0.0
        with asking:
            while len(found) < len(abouts):
                now = time.monotonic()
                if now >= deadline:
                    break
                if now >= again_s:
                    for peer in abouts.keys() - found.keys():
                        self._send(asking, peer, abouts[peer], tag, number)
                    again_s = now + _AGAIN_S
                asking.settimeout(max(1e-3, min(again_s, deadline) - now))
                answer = _received(asking, number)
                if answer is not None and answer[0] in abouts:
                    found[answer[0]] = answer[1]
        return found

    def _send(
        self, asking: socket.socket, peer: int, about: int, tag: int, number: str
    ) -> None:
        place = self._places[peer]
        question = {"secret": place.secret, "number": number, "tag": tag}
        data = json.dumps({**question, "about": about, "by": self._rank}).encode()
        mine = machine_identity()
        addresses = [*place.addresses]
        if place.machine == mine:
            addresses.insert(0, "127.0.0.1")
        for address in addresses if place.port else ():
            with contextlib.suppress(OSError):  # it cannot be reached that way
                asking.sendto(data, _to(asking, address, place.port))

    # -- answering ---------------------------------------------------------------

    def _serve(self) -> None:
        own = self._socket
        assert own is not None
        with selectors.DefaultSelector() as waits:
            waits.register(own, selectors.EVENT_READ)
            waits.register(self._wake, selectors.EVENT_READ)
            while all(key.fileobj is own for key, _ in waits.select()):
                with contextlib.suppress(OSError):
                    data, source = own.recvfrom(_MOST_NBYTES)
                    answer = self._answer(data)
                    if answer is not None:
                        own.sendto(answer, source)

    def _answer(self, data: bytes) -> bytes | None:
        """Return the answer to a question; None to anything else."""
        asked = _parsed(data, {"secret": str, "number": str})
        numbers = _parsed(data, {"tag": int, "about": int, "by": int})
        if asked is None or numbers is None:
            return None
        shown = asked["secret"].encode(errors="replace")
        if not hmac.compare_digest(shown, self._secret.encode()):
            return None
        row: Row = ()
        if numbers["about"] == _DUMP:
            _native.ask_flight_here(numbers["by"])
        else:
            if self._liveness is not None:
                self._liveness.look()
            row = self.told.answer(numbers["tag"], numbers["about"])
        said = {"number": asked["number"], "rank": self._rank, "row": row}
        return json.dumps(said).encode()


def _received(asking: socket.socket, number: str) -> tuple[int, Row] | None:
    """Return who answers what; None where nothing comes in time, or something else."""
    try:
        data, _ = asking.recvfrom(_MOST_NBYTES)
    except OSError:
        return None
    said = _parsed(data, {"number": str, "rank": int, "row": list})
    if said is None or said["number"] != number:
        return None
    return said["rank"], (*said["row"],)


def _parsed(data: bytes, kinds: Mapping[str, type]) -> dict[str, Any] | None:
    """Return the fields of a datagram; None where they are not of these types."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    fits = all(type(said.get(name)) is kind for name, kind in kinds.items())
    in_range = all(
        -(2**31) <= said[name] < 2**31
        for name, kind in kinds.items()
        if fits and kind is int
    )
    return said if fits and in_range else None


def _opened(families: Sequence[socket.AddressFamily]) -> socket.socket | None:
    """Return a socket for datagrams; None where none can be had."""
    for family in families:
        with contextlib.suppress(OSError):
            return _of_family(family)
    return None


def _of_family(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("", 0))
    except OSError:
        made.close()
        raise
    return made


def _to(asking: socket.socket, address: str, port: int) -> tuple[str, int]:
    """Return where a socket sends to; one of the newer family maps older addresses."""
    if asking.family == socket.AF_INET6 and ":" not in address:
        return (f"::ffff:{address}", port)
    return (address, port)
