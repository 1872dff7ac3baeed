# SPDX-License-Identifier: Apache-2.0
"""Memory in which the ranks of a node read each other's entries where they lie.

Each rank has two halves, which successive operations use in turn, and each half two
sections: what a rank has, for the ranks that sum it, and the sum of its own range, for
all. So nothing is copied for each receiver. It costs no message: the header of an
operation, which goes first anyway, says whose entries are there, and how many
operations each rank has ended; a half is written again once all ranks have ended the
operation that used it last. A rank that does not know that yet says so in its header,
and then the operation goes by messages, on all ranks alike.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commrt import env
from commrt.errors import BackendError
from commrt.job.arena import Arena
from commrt.job.memory_limit import memory_limit_nbytes
from commrt.sparse.pieces import Elements, Piece

if TYPE_CHECKING:
    from commrt.calls.channel import Channel

__all__ = ["Desk", "Room", "make_room"]

_HALVES, _SECTIONS = 2, 2
_HAD, _SUMMED = 0, 1
_SECTION_NBYTES = 16 << 20
"""Most bytes that a rank uses of a section; only written pages take memory."""
_LEAST_SECTION_NBYTES = 1 << 16
_PART_OF_LIMIT = 8
"""All sections of a node use at most this part of what its memory is."""
_LINE = 64


class Room:
    """The memory of one communicator's ranks, which share a node."""

    def __init__(self, arena: Arena, me: int, most_nbytes: int) -> None:
        self._arena = arena
        self._closed = False
        self.me = me
        self.section_nbytes = arena.region_nbytes // (_HALVES * _SECTIONS)
        """Bytes from one section to the next, the same on all ranks."""
        self.most_nbytes = min(most_nbytes, self.section_nbytes)
        """Bytes of a section that this rank may use."""
        self.ended = 0
        """Number of operations that all ranks are known to have ended."""

    def all_ended(self, count: int) -> None:
        """Take note that all ranks have ended the first ``count`` operations."""
        self.ended = max(self.ended, count)

    def desk(self, seq: int) -> Desk | None:
        """Return the sections that operation ``seq`` may write; None: not yet."""
        free = seq < _HALVES or self.ended >= seq - _HALVES + 1
        return Desk(self, seq % _HALVES) if free else None

    def address(self, rank: int, half: int, section: int) -> int:
        """Return the address of a rank's section."""
        region = self._arena.address + rank * self._arena.region_nbytes
        return region + (_SECTIONS * half + section) * self.section_nbytes

    def close(self) -> None:
        """Unmap; idempotent. Nothing may use it afterwards."""
        if not self._closed:
            self._closed = True
            self._arena.close()

    def __del__(self) -> None:
        # The communicator was dropped or has failed: requests refer to this memory,
        # too.
        if not sys.is_finalizing():
            self.close()


@dataclass(frozen=True)
class Desk:
    """The halves that one operation uses."""

    room: Room
    half: int

    def most(self, elements: Elements) -> int:
        """Return the number of entries that this rank may have in a section."""
        return (self.room.most_nbytes - _LINE) // elements.entry_nbytes

    def lay_out(self, elements: Elements, mine: Piece, offsets: Sequence[int]) -> None:
        """Copy this rank's entries there, but those of its own range.

        ``offsets`` of the entries where the ranges begin, and where the last one ends.
        """
        me = self.room.me
        to = self.had(elements, me, 0, mine.count, mine.first, mine.last)
        for low, high in ((0, offsets[me]), (offsets[me + 1], mine.count)):
            elements.copy(elements.part(mine, low, high), elements.part(to, low, high))

    def had(
        self,
        elements: Elements,
        rank: int,
        low: int,
        count: int,
        first: int,
        last: int,
    ) -> Piece:
        """Return entries of a rank from number ``low`` on, which lie in a range; not
        those of its own range, which are not there."""
        return self._piece(elements, rank, _HAD, low, count, first, last)

    def summed(
        self, elements: Elements, rank: int, count: int, first: int, last: int
    ) -> Piece:
        """Return the sum of a rank's range, or the room for it."""
        return self._piece(elements, rank, _SUMMED, 0, count, first, last)

    def _piece(
        self,
        elements: Elements,
        rank: int,
        section: int,
        low: int,
        count: int,
        first: int,
        last: int,
    ) -> Piece:
        indices = self.room.address(rank, self.half, section)
        # Behind as many indices as there can be: nobody has to know how many there are.
        most = (self.room.section_nbytes - _LINE) // elements.entry_nbytes
        values = indices + -(-most * elements.index_nbytes // _LINE) * _LINE
        indices += low * elements.index_nbytes
        values += low * elements.dtype.itemsize
        return Piece(first, last, False, count, indices, values, self.room)


def make_room(channel: Channel) -> Room | None:
    """Return memory for a new channel, None where this rank has none for it. Local."""
    if channel.size == 1 or channel.facts.nodes > 1:
        return None
    # A file in /dev/shm is there as a whole, used or not.
    if env.read_str("COMMRT_SHM") == "devshm":
        return None
    limit_nbytes = memory_limit_nbytes() // _PART_OF_LIMIT // channel.size
    section_nbytes = min(_SECTION_NBYTES, limit_nbytes // (_HALVES * _SECTIONS))
    if section_nbytes < _LEAST_SECTION_NBYTES:
        return None
    try:
        return Room(channel.room(), channel.rank, section_nbytes)
    except BackendError:
        return None
