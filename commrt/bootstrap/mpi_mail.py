# SPDX-License-Identifier: Apache-2.0
"""Messages of the bootstrap on one private MPI communicator.

Worlds of some of its ranks share it with the world of all of them: exchanges are told
apart by their names. Nothing blocks inside MPI: nonblocking calls, polled from Python.

Where MPI survives failures, messages to and from ranks that have failed get lost
without an error: who waits for such a rank asks whether it lives.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from commrt.bootstrap.ballots import Ballot, Vote
from commrt.bootstrap.base import ByExchange, Identities
from commrt.mpi.ulfm import Beside, FailedRanks, is_failure, survival

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["TAG", "Mailbox", "Says", "Topic"]

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
    WORD = 3
    """The sender says something to whoever asks; it belongs to no attempt."""


@dataclass
class Topic:
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


class Mailbox:
    """The messages of one MPI communicator, by exchange.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: an mpi4py communicator on which nobody else uses ``TAG``.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm) -> None:
        self._mpi = mpi
        self.comm = comm
        self.lock = threading.Lock()
        self.survives = survival().can
        """True if ranks can go on after one has failed."""
        self.failed = FailedRanks(comm if self.survives else None)
        """The ranks that have failed, as MPI knows."""
        self.identities = Identities()
        """Numbers of the communicators whose messages go over this one."""
        self.topics: ByExchange[Topic] = ByExchange(Topic)
        self.ballots: ByExchange[Ballot] = ByExchange(Ballot)
        self.words: ByExchange[dict[int, bytes]] = ByExchange(dict)
        """The last words of ranks of the communicator, by key."""
        self.shrinking: Beside | None = None
        """The call that makes a communicator of the ranks that live."""
        self._receiving: list[tuple[Any, int, bytearray]] = []
        self._abandoned: list[tuple[Any, Any]] = []

    def forget(self, key: str) -> None:
        """Drop what is kept of exchanges that no rank makes any more."""
        self.topics.forget(key)
        self.ballots.forget(key)
        self.words.forget(key)

    def send(
        self, says: int, attempt: int, name: str, blob: bytes, place: int
    ) -> tuple[Any, bytes]:
        """Start to send to a rank of the communicator; hold ``lock``."""
        message = pack(says, attempt, name, blob)
        return self.start_to_send(message, place), message

    def start_to_send(self, message: bytes, place: int) -> Any:
        """Return the request of a message; hold ``lock``."""
        try:
            return self.comm.Isend([message, self._mpi.BYTE], dest=place, tag=TAG)
        except self._mpi.Exception as error:
            if not is_failure(self._mpi, error):
                raise
            return self._mpi.Request()  # a null one has ended

    def has_ended(self, request: Any) -> bool:
        """Return whether a message has left, or never will; hold ``lock``."""
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            if not is_failure(self._mpi, error):
                raise
            return True

    def abandon(self, sends: Sequence[tuple[Any, Any]]) -> None:
        """Keep buffers that nobody waits for until they have left; hold ``lock``."""
        kept = [*self._abandoned, *sends]
        self._abandoned = [each for each in kept if not self.has_ended(each[0])]

    def progress(self) -> None:
        """Start every receive that is there, and take what is done; hold ``lock``."""
        while (found := self._next()) is not None:
            message, source, length = found
            buffer = bytearray(length)
            request = message.Irecv([buffer, self._mpi.BYTE])
            self._receiving.append((request, source, buffer))
        waiting = []
        late: set[int] = set()
        for request, source, buffer in self._receiving:
            # In the order sent: a withdrawal must not overtake what it withdraws.
            if source in late:
                waiting.append((request, source, buffer))
                continue
            try:
                done = request.Test()
            except self._mpi.Exception as error:
                if not is_failure(self._mpi, error):
                    raise
                continue  # its sender has failed, and with it what it was sending
            if done:
                self._take(source, buffer)
            else:
                late.add(source)
                waiting.append((request, source, buffer))
        self._receiving = waiting

    def _next(self) -> tuple[Any, int, int] | None:
        """Return a message that is there, its source and length."""
        status = self._mpi.Status()
        try:
            message = self.comm.Improbe(tag=TAG, status=status)
        except self._mpi.Exception as error:
            if not is_failure(self._mpi, error):
                raise
            self.failed.acknowledge()
            return None  # looked for again in the next call
        if message is None:
            return None
        return message, status.Get_source(), status.Get_count(self._mpi.BYTE)

    def _take(self, source: int, buffer: bytearray) -> None:
        says, attempt, name, blob = _unpack(buffer)
        if says >= Vote.CAME:
            self.ballots.of(name).take(Vote(says), blob)
            return
        if says == Says.WORD:
            self.words.of(name)[source] = blob
            return
        topic = self.topics.of(name)
        if attempt < topic.attempt:
            return  # of an attempt that is over here
        if says == Says.WITHDRAWN:
            topic.withdrawn.add(attempt)
        elif says == Says.HEARD:
            topic.heard.add((attempt, source))
        else:
            topic.said[attempt, source] = blob


def pack(says: int, attempt: int, exchange: str, blob: bytes) -> bytes:
    """Return a message of an exchange."""
    name = exchange.encode()
    return _HEADER.pack(says, attempt, len(name)) + name + blob


def _unpack(message: bytearray) -> tuple[int, int, str, bytes]:
    says, attempt, length = _HEADER.unpack_from(message)
    start = _HEADER.size
    name = bytes(message[start : start + length]).decode()
    return says, attempt, name, bytes(message[start + length :])
