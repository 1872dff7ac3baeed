# SPDX-License-Identifier: Apache-2.0
"""Pieces as messages: a header that says what comes, then indices and values.

Which ranks talk to which, and in which order, is fixed by the algorithm; how much they
say is not. The receiver learns it from the header and then receives into exactly as
much. All messages of an operation have one tag, its number on the private communicator,
so neither the user's messages nor those of another operation can be taken for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt._native import PersistentMessages, Request
from commrt.group.stepped import Steps
from commrt.sparse.coordinates import words_of
from commrt.sparse.cost import Rule
from commrt.sparse.pieces import Elements, Piece
from commrt.sparse.shared import Room
from commrt.vocabulary.dtypes import dtype_by_name

if TYPE_CHECKING:
    from commrt.calls.channel import Channel

__all__ = [
    "Talk",
    "allgather",
    "deliver",
    "exchange",
    "share_rows",
    "tell",
]

_FIELDS, _WIDE_FIELDS = 4, 6


@dataclass
class Talk:
    """One operation's messages among the ranks of a communicator."""

    comm: Channel
    """The private one."""
    tag: int
    elements: Elements
    timeout_s: float
    seq: int = 0
    """The operation's number on the communicator."""
    ended: int = 0
    """All operations below this one have ended on this rank."""
    room: Room | None = None
    """Memory that all ranks share, if they do."""
    rules: dict[Any, tuple[Rule, ...]] = field(default_factory=dict)
    """Rules for each kind of call that the communicator has had."""
    phases: list[dict[str, int]] = field(default_factory=list)
    """Numbers of each exchange: entries sent and received, bytes, dense pieces
    received."""

    @property
    def num_fields(self) -> int:
        """Integers of a piece's header."""
        return _WIDE_FIELDS if self.elements.is_wide else _FIELDS

    def send(self, address: int, nbytes: int, dest: int, owner: Any) -> Request:
        """Start a message of raw bytes."""
        request: Request = self.comm.send_bytes(
            address, nbytes, dest, self.tag, owner, "send", True, self.timeout_s
        )
        request.be_quiet()  # where the operation fails, it tells of this one, too
        return request

    def recv(self, address: int, nbytes: int, source: int, owner: Any) -> Request:
        """Start to receive raw bytes."""
        request: Request = self.comm.recv_bytes(
            address,
            nbytes,
            source,
            self.tag,
            owner,
            owner,
            "recv",
            True,
            self.timeout_s,
        )
        request.be_quiet()
        return request

    def send_array(self, array: Any, dest: int) -> Request:
        """Start a message that is a numpy array."""
        return self.send(array.ctypes.data, array.nbytes, dest, array)

    def recv_array(self, array: Any, source: int) -> Request:
        """Start to receive a numpy array."""
        return self.recv(array.ctypes.data, array.nbytes, source, array)

    def send_piece(self, piece: Piece, dest: int) -> list[Request]:
        """Start the messages behind a piece's header."""
        return [
            self.send(address, nbytes, dest, piece.owner)
            for address, nbytes in self._parts(piece)
        ]

    def recv_piece(self, piece: Piece, source: int) -> list[Request]:
        """Start to receive into the memory of ``piece``."""
        return [
            self.recv(address, nbytes, source, piece.owner)
            for address, nbytes in self._parts(piece)
        ]

    def _parts(self, piece: Piece) -> list[tuple[int, int]]:
        if piece.count == 0:
            return []
        values = piece.values, piece.count * self.elements.dtype.itemsize
        if piece.dense:
            return [values]
        return [(piece.indices, piece.count * self.elements.index_nbytes), values]

    def note(self, sent: Sequence[Piece], received: Sequence[Piece]) -> None:
        """Keep what an exchange moved."""
        nbytes = sum(size for piece in received for _, size in self._parts(piece))
        self.phases.append(
            {
                "sent": sum(piece.count for piece in sent),
                "received": sum(piece.count for piece in received),
                "nbytes": nbytes,
                "dense": sum(piece.dense for piece in received),
            }
        )


def _header(talk: Talk, pieces: Sequence[Piece]) -> Any:
    if talk.elements.is_wide:
        wide = [
            [*words_of(p.first), *words_of(p.last), int(p.dense), p.count]
            for p in pieces
        ]
        found = np.array(wide, np.object_).reshape(len(wide), _WIDE_FIELDS)
        return found.astype(np.uint64).view(np.int64)
    rows = [[p.first, p.last, int(p.dense), p.count] for p in pieces]
    return np.array(rows, np.int64).reshape(len(rows), _FIELDS)


def _announced(header: Any) -> list[Piece]:
    """Return the pieces that a header announces; they have no memory yet."""
    if header.shape[1] == _WIDE_FIELDS:
        rows = header.view(np.uint64).tolist()
        return [
            Piece(low | high << 64, to | end << 64, bool(dense), count, 0, 0, None)
            for low, high, to, end, dense, count in rows
        ]
    return [
        Piece(first, last, bool(dense), count, 0, 0, None)
        for first, last, dense, count in header.tolist()
    ]


def exchange(
    talk: Talk,
    sends: Sequence[tuple[int, Piece]],
    sources: Sequence[int],
    told: Sequence[Piece] | None = None,
) -> Steps[list[Piece]]:
    """Send pieces to ranks while receiving one from each source, in that order.

    ``told``: their sizes, where all ranks know all of them already. Then no headers go.
    """
    sending: list[Request] = []
    if told is None:
        headers = [np.empty((1, talk.num_fields), np.int64) for _ in sources]
        arriving = [
            talk.recv_array(header, source)
            for header, source in zip(headers, sources, strict=True)
        ]
        for dest, piece in sends:
            sending.append(talk.send_array(_header(talk, [piece]), dest))
            sending += talk.send_piece(piece, dest)
        yield arriving
        told = [_announced(header)[0] for header in headers]
        sends_left: Sequence[tuple[int, Piece]] = ()
    else:
        sends_left = sends
    found = []
    rest: list[Request] = []
    for size, source in zip(told, sources, strict=True):
        piece = talk.elements.empty_piece(size.first, size.last, size.dense, size.count)
        rest += talk.recv_piece(piece, source)
        found.append(piece)
    for dest, piece in sends_left:
        sending += talk.send_piece(piece, dest)
    yield [*rest, *sending]
    talk.note([piece for _, piece in sends], found)
    return found


def tell(
    talk: Talk, ranks: Sequence[int], mine: Sequence[Piece]
) -> Steps[dict[int, list[Piece]]]:
    """Return the sizes (pieces without memory) that each of ``ranks`` has.

    All of them have equally many pieces.
    """
    me = talk.comm.rank
    form = len(mine), talk.num_fields
    headers = {rank: np.empty(form, np.int64) for rank in ranks}
    headers[me] = _header(talk, mine)
    others = _in_turn(ranks, me)
    arriving = [talk.recv_array(headers[rank], rank) for rank in others]
    sending = [talk.send_array(headers[me], rank) for rank in reversed(others)]
    yield [*arriving, *sending]
    return {rank: _announced(header) for rank, header in headers.items()}


def share_rows(talk: Talk, row: Any) -> Steps[Any]:
    """Return the rows of all ranks, as many integers each."""
    ranks = range(talk.comm.size)
    rows = np.empty((talk.comm.size, row.size), np.int64)
    rows[talk.comm.rank] = row
    others = _in_turn(ranks, talk.comm.rank)
    nbytes, out = row.nbytes, rows.ctypes.data
    integers = talk.tag, dtype_by_name("int64").code, False
    sends = [(row.ctypes.data, nbytes, rank, *integers) for rank in others]
    recvs = [(out + rank * nbytes, nbytes, rank, *integers) for rank in others]
    messages = PersistentMessages(talk.comm, sends, recvs, row, rows, rows, "tell")
    yield [messages.run(True, talk.timeout_s)]
    return rows


def deliver(
    talk: Talk, mine: Sequence[Piece], placed: Mapping[int, Sequence[Piece]]
) -> Steps[None]:
    """Give every rank of ``placed`` this rank's pieces; receive theirs to there."""
    me = talk.comm.rank
    others = _in_turn(list(placed), me)
    waiting: list[Request] = []
    for rank in others:
        for piece in placed[rank]:
            waiting += talk.recv_piece(piece, rank)
    for rank in reversed(others):
        for piece in mine:
            waiting += talk.send_piece(piece, rank)
    for piece, to in zip(mine, placed[me], strict=True):
        talk.elements.copy(piece, to)
    yield waiting
    talk.note(mine, [piece for rank in others for piece in placed[rank]])


def allgather(
    talk: Talk, ranks: Sequence[int], mine: Sequence[Piece]
) -> Steps[list[Piece]]:
    """Return the pieces of all of ``ranks``, in their order, in new memory."""
    sizes = yield from tell(talk, ranks, mine)
    placed = {
        rank: [
            talk.elements.empty_piece(p.first, p.last, p.dense, p.count) for p in pieces
        ]
        for rank, pieces in sizes.items()
        if rank != talk.comm.rank
    }
    yield from deliver(talk, mine, {**placed, talk.comm.rank: mine})
    return [
        piece
        for rank in ranks
        for piece in (mine if rank == talk.comm.rank else placed[rank])
    ]


def _in_turn(ranks: Sequence[int], me: int) -> list[int]:
    """Return the other ranks, from the one before this: nobody comes first."""
    at = list(ranks).index(me)
    return [ranks[(at - step) % len(ranks)] for step in range(1, len(ranks))]
