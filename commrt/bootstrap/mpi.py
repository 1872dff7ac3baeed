# SPDX-License-Identifier: Apache-2.0
"""Ranks that MPI started: keyed messages on a private communicator.

Every member sends its blob to every other member, and then, when it has heard all,
that it has. That is 2 size² small messages in all, and in return each member knows
exactly who is missing when time runs out. Nothing blocks inside MPI: nonblocking calls,
polled from Python.

A member that gives up withdraws its attempt by another message. Those who still wait,
or come only then, go on to the next attempt; who has waited says its blob again once
somebody is there, so that many that give up together do not all talk to all. A
withdrawal may arrive long after the blob that it takes back. So a blob alone does not
mean that its sender still waits: only what it says after it has heard everybody does.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from commrt.bootstrap.base import (
    ByExchange,
    Keys,
    check_alive,
    poll_until,
    timed_out,
    with_heed,
)
from commrt.errors import TimeoutError_
from commrt.vocabulary.limits import deadline_after

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["TAG", "MpiBootstrap"]

TAG = 7
"""The one tag used on the private communicator."""

_HEADER = struct.Struct("<BQI")
"""Fields of a message: kind, number of the attempt, length of the exchange's name."""


class Says(IntEnum):
    """The state of a sender's attempt, as its message says it."""

    BLOB = 0
    HEARD = 1
    """The sender has everybody's blob, and waits for everybody to say so."""
    WITHDRAWN = 2


@dataclass
class _Topic:
    """This rank's state of the exchanges of one name."""

    attempt: int = 0
    """Number of this rank's attempt, or of the next one if it has left the last."""
    said: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Blobs that came, by attempt and rank."""
    heard: set[tuple[int, int]] = field(default_factory=set)
    """Attempts and ranks: each of these ranks has everybody's blob in that attempt."""
    withdrawn: set[int] = field(default_factory=set)

    def skip_withdrawn(self) -> bool:
        """Go on to an attempt that nobody has withdrawn; say if it is another."""
        before = self.attempt
        while self.attempt in self.withdrawn:
            self.attempt += 1
        self.withdrawn = {one for one in self.withdrawn if one >= self.attempt}
        self.said = {
            at: blob for at, blob in self.said.items() if at[0] >= self.attempt
        }
        self.heard = {at for at in self.heard if at[0] >= self.attempt}
        return self.attempt != before

    def came(self) -> set[int]:
        """Return the ranks in this attempt or a later one."""
        return {rank for _, rank in self.said}


class MpiBootstrap:
    """Exchanges blobs over a private duplicate of an mpi4py communicator.

    ``comm`` is that duplicate: code below the public interface may send on it with
    other tags than ``TAG``.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, timeout_s: float) -> None:
        """Collective over ``mpi_comm``."""
        from mpi4py import MPI

        self._mpi = MPI
        self.mpi_comm = mpi_comm
        self.rank: int = mpi_comm.Get_rank()
        self.size: int = mpi_comm.Get_size()
        self.comm = self._duplicate(mpi_comm, timeout_s)
        self.idle: Callable[[], object] | None = None
        self.gone: Callable[[int], str] | None = None
        self._keys = Keys(self.rank, self.size)
        self.lock = threading.Lock()
        self._topics: ByExchange[_Topic] = ByExchange(_Topic)
        self._receiving: list[tuple[Any, int, bytearray]] = []

    def exchange(
        self,
        members: Sequence[int],
        key: str,
        blob: bytes,
        timeout_s: float,
        heed: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Give ``blob`` to all members; return everybody's, in members' order."""
        with self._keys.turn(members, key, timeout_s) as (name, left_s):
            others = [member for member in members if member != self.rank]
            rendezvous = _Rendezvous(self, name, others, bytes(blob))
            heeds = with_heed(
                heed, check_alive(self.gone, key, others, rendezvous.has_come)
            )
            try:
                met = poll_until(rendezvous.step, left_s, with_heed(self.idle, heeds))
                blobs = rendezvous.result() if met else {}
            finally:
                rendezvous.end()
        if not met:
            missing = rendezvous.missing()
            raise timed_out(self.rank, members, key, missing, timeout_s)
        return [blobs.get(member, bytes(blob)) for member in members]

    def regroup(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> tuple[MpiBootstrap, dict[int, bytes]]:
        """Return the bootstrap of all members, and what they said.

        MPI's launcher ends the job when a rank dies, so that none is missing.
        """
        deadline = deadline_after(timeout_s)
        blobs = self.exchange(members, key, blob, timeout_s)
        group = self.comm.Get_group().Incl(list(members))
        part = self.comm.Create_group(group, TAG)  # all have just met: nobody is late
        made = MpiBootstrap(part, max(0.0, deadline - time.monotonic()))
        made.idle = self.idle
        return made, dict(zip(members, blobs, strict=True))

    def forget(self, key: str) -> None:
        """Drop the numbers of attempts."""
        self._topics.forget(key)

    def close(self) -> None:
        """Free the private communicator, if MPI still runs."""
        if self.comm and not self._mpi.Is_finalized():
            self.comm.Free()

    def _duplicate(self, mpi_comm: MPI.Intracomm, timeout_s: float) -> Any:
        self._abandoned: list[tuple[Any, Any]] = []
        comm, request = mpi_comm.Idup()
        if not poll_until(request.Test, timeout_s):
            self._abandoned.append((request, comm))
            raise TimeoutError_(
                f"rank {self.rank} of {self.size}: not every rank of "
                f"{mpi_comm.Get_name() or 'the communicator'} called commrt.init() "
                f"within {timeout_s:g} s; it is collective. Look for an error or an "
                f"early exit on the other ranks."
            )
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        comm.Set_name("commrt bootstrap")
        return comm

    def topic(self, name: str) -> _Topic:
        """Return this rank's state of a name's exchanges; hold ``lock``."""
        return self._topics.of(name)

    def send(self, message: bytes, peer: int) -> Any:
        """Start to send; hold ``lock``."""
        return self.comm.Isend([message, self._mpi.BYTE], dest=peer, tag=TAG)

    def abandon(self, sends: Sequence[tuple[Any, Any]]) -> None:
        """Keep buffers that nobody waits for until they have left; hold ``lock``."""
        kept = [*self._abandoned, *sends]
        self._abandoned = [each for each in kept if not each[0].Test()]

    def progress(self) -> None:
        """Start every receive that is there, and take what is done; hold ``lock``."""
        status = self._mpi.Status()
        while True:
            message = self.comm.Improbe(tag=TAG, status=status)
            if message is None:
                break
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            request = message.Irecv([buffer, self._mpi.BYTE])
            self._receiving.append((request, status.Get_source(), buffer))
        waiting = []
        late: set[int] = set()
        for request, source, buffer in self._receiving:
            # In the order sent: a withdrawal must not overtake what it withdraws.
            if source not in late and request.Test():
                self._take(source, buffer)
            else:
                late.add(source)
                waiting.append((request, source, buffer))
        self._receiving = waiting

    def _take(self, source: int, buffer: bytearray) -> None:
        says, attempt, name, blob = _unpack(buffer)
        topic = self.topic(name)
        if attempt < topic.attempt:
            return  # of an attempt that is over here
        if says == Says.WITHDRAWN:
            topic.withdrawn.add(attempt)
        elif says == Says.HEARD:
            topic.heard.add((attempt, source))
        else:
            topic.said[attempt, source] = blob


class _Rendezvous:
    """One exchange of one rank."""

    def __init__(
        self, bootstrap: MpiBootstrap, name: str, others: Sequence[int], blob: bytes
    ) -> None:
        self._bootstrap = bootstrap
        self._name = name
        self._others = others
        self._blob = blob
        self._sends: list[tuple[Any, bytes]] = []
        self._attempt: int | None = None
        """Number of the attempt that this rank has announced to all others."""
        self._has_heard = False
        """True if this rank has everybody's blob in this attempt, and has said so to
        all."""
        self._done = False
        self._came: set[int] = set()
        self._silent: list[int] = []
        """Ranks that came to this attempt and have not said that they have everybody's
        blob."""
        with bootstrap.lock:
            self._topic = bootstrap.topic(name)

    def step(self) -> bool:
        """Make some progress; return whether everybody is there."""
        bootstrap, topic = self._bootstrap, self._topic
        with bootstrap.lock:
            bootstrap.progress()
            self._came |= topic.came()
            if topic.skip_withdrawn():
                self._abandon_sends()
            had_told = self._attempt is not None
            if self._attempt != topic.attempt and (topic.said or not had_told):
                self._attempt = topic.attempt
                self._has_heard = False
                self._tell(Says.BLOB, self._blob)
            if not self._has_heard and not self._without(topic.said):
                self._has_heard = True
                self._tell(Says.HEARD)
            self._sends = [sent for sent in self._sends if not sent[0].Test()]
            self._silent = self._without(topic.heard) if self._has_heard else []
            self._done = self._has_heard and not self._silent and not self._sends
            return self._done

    def result(self) -> dict[int, bytes]:
        """Return the blobs of the others."""
        with self._bootstrap.lock:
            attempt = self._topic.attempt
            return {peer: self._topic.said[attempt, peer] for peer in self._others}

    def end(self) -> None:
        """Leave the attempt; withdraw it if it was not complete."""
        bootstrap, topic = self._bootstrap, self._topic
        with bootstrap.lock:
            self._abandon_sends()
            if self._attempt != topic.attempt:
                return  # somebody else has withdrawn it
            if not self._done:
                self._tell(Says.WITHDRAWN)
                self._abandon_sends()
            topic.withdrawn.add(topic.attempt)
            topic.skip_withdrawn()

    def has_come(self, rank: int) -> bool:
        """Return whether a rank has done its part in this attempt."""
        heard = not self._has_heard or rank not in self._silent
        return rank in self._topic.came() and heard

    def missing(self) -> list[int]:
        """Return the ranks that did not come, or if all came, those that gave up."""
        never = [peer for peer in self._others if peer not in self._came]
        now = self._topic.came()
        gone = [peer for peer in self._others if peer not in now]
        return never or self._silent or gone

    def _without(self, ranks: Container[tuple[int, int]]) -> list[int]:
        """Return the others that ``ranks``, by attempt and rank, lack in this one."""
        return [peer for peer in self._others if (self._attempt, peer) not in ranks]

    def _tell(self, says: Says, blob: bytes = b"") -> None:
        assert self._attempt is not None
        message = _pack(says, self._attempt, self._name, blob)
        for peer in self._others:
            self._sends.append((self._bootstrap.send(message, peer), message))

    def _abandon_sends(self) -> None:
        self._bootstrap.abandon(self._sends)
        self._sends = []


def _pack(says: Says, attempt: int, exchange: str, blob: bytes) -> bytes:
    name = exchange.encode()
    return _HEADER.pack(says, attempt, len(name)) + name + blob


def _unpack(message: bytearray) -> tuple[int, int, str, bytes]:
    says, attempt, length = _HEADER.unpack_from(message)
    start = _HEADER.size
    name = bytes(message[start : start + length]).decode()
    return says, attempt, name, bytes(message[start + length :])
