# SPDX-License-Identifier: Apache-2.0
"""The output of a sparse operation: its format, and pieces put together."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.arrays.host import HostView
from commrt.group.stepped import Steps
from commrt.sparse.coordinates import Keys, coordinates_of
from commrt.sparse.messages import Talk, deliver, tell
from commrt.sparse.pieces import Elements, Piece
from commrt.sparse.vector import SparseArgument, SparseVector

__all__ = ["FORMATS", "Output", "bytes_at", "bytes_from", "like"]

FORMATS = ("auto", "sparse", "dense")


@dataclass(frozen=True)
class Output:
    """The output that the caller wants."""

    argument: SparseArgument
    elements: Elements
    format: str
    """One of ``FORMATS``."""
    out: HostView | None
    """The array for a dense output."""

    @property
    def length(self) -> int:
        """Elements of the whole vector."""
        return self.argument.length

    def is_dense(self, pieces: Sequence[Piece]) -> bool:
        """Return the format that all ranks take, from sizes that all of them know."""
        if self.format != "auto":
            return self.format == "dense"
        entries = sum(piece.count for piece in pieces)
        return self.length > 0 and self.elements.dense_pays(entries, self.length)

    def from_piece(self, piece: Piece) -> Any:
        """Return the output where this rank has all of it in one piece."""
        if self.is_dense([piece]):
            if piece.dense and self.out is None:
                return self._dense(piece)
            whole = self._dense_memory(may_hold_anything=False)
            self.elements.add_into(whole, piece)
            return self._dense(whole)
        found = self.elements.sparsified(piece)
        if found.indices == self.argument.indices.address:  # nothing was merged: a copy
            found = self._copied(found)
        return self._sparse(found.owner, found.count)

    def gathered(self, talk: Talk, mine: Piece) -> Steps[Any]:
        """Return the output where each rank has one of the successive ranges.

        The ranges come straight to where they belong. Dense ones of an output that is
        sparse as a whole are made sparse first, so their sizes are told once more.
        """
        ranks = range(talk.comm.size)
        told = yield from tell(talk, ranks, [mine])
        sizes = [told[rank][0] for rank in ranks]
        if not self.is_dense(sizes):
            if any(piece.dense for piece in sizes):
                mine = self.elements.sparsified(mine)
                told = yield from tell(talk, ranks, [mine])
                sizes = [told[rank][0] for rank in ranks]
            placed, room = self.side_by_side(sizes)
            yield from deliver(talk, [mine], {rank: [placed[rank]] for rank in ranks})
            return self._sparse(room, len(room[0]))
        whole = self._dense_memory(may_hold_anything=all(p.dense for p in sizes))
        bounds = [piece.first for piece in sizes] + [self.length]
        landed = [
            there
            if piece.dense
            else self.elements.empty_piece(piece.first, piece.last, False, piece.count)
            for piece, there in zip(
                sizes, self.elements.split(whole, bounds), strict=True
            )
        ]
        yield from deliver(talk, [mine], {rank: [landed[rank]] for rank in ranks})
        for piece in landed:
            if not piece.dense:
                self.elements.add_into(whole, piece)
        return self._dense(whole)

    def joined(self, pieces: Sequence[Piece]) -> Any:
        """Return the output where this rank has pieces of all successive ranges."""
        if self.is_dense(pieces):
            whole = self._dense_memory(may_hold_anything=False)
            for piece in pieces:
                self.elements.add_into(whole, piece)
            return self._dense(whole)
        sparse = [self.elements.sparsified(piece) for piece in pieces]
        placed, room = self.side_by_side(sparse)
        for piece, to in zip(sparse, placed, strict=True):
            self.elements.copy(piece, to)
        return self._sparse(room, len(room[0]))

    def side_by_side(self, sizes: Sequence[Piece]) -> tuple[list[Piece], Any]:
        """Return successive places in one output, and that."""
        room = self.elements.entries(sum(piece.count for piece in sizes))
        whole = self.elements.piece(0, self.length, room, len(room[0]))
        at, placed = 0, []
        for piece in sizes:
            placed.append(self.elements.part(whole, at, at + piece.count))
            at += piece.count
        return placed, room

    def _dense_memory(self, may_hold_anything: bool) -> Piece:
        """Return the piece of the whole output: zeros, if it must be that."""
        if self.out is None:
            memory = self.elements.elements(self.length, zero=not may_hold_anything)
            return self.elements.dense_piece(0, self.length, memory)
        raw = bytes_at(self.out)
        if not may_hold_anything:
            raw[:] = 0
        address = self.out.address
        return Piece(0, self.length, True, self.length, 0, address, self.out.owner)

    def _copied(self, piece: Piece) -> Piece:
        room = self.elements.entries(piece.count)
        room[0][:] = bytes_at(self.argument.indices).view(room[0].dtype)
        room[1][:] = bytes_at(self.argument.values)
        return self.elements.piece(0, self.length, room, piece.count)

    def _sparse(self, room: tuple[Any, Any], count: int) -> SparseVector:
        indices, values = room
        item = self.elements.dtype.itemsize
        found = like(self.argument.values, values[: count * item])
        listed = indices[:count]
        if self.argument.by_dimension:
            shape = self.argument.shape
            nbytes = self.elements.index_nbytes
            listed = coordinates_of(nbytes, shape, listed, count)
        if hasattr(found, "new_empty"):  # of torch, which is there then
            listed = sys.modules["torch"].from_numpy(listed)
        return SparseVector(listed, found, self.argument.shape)

    def _dense(self, whole: Piece) -> Any:
        if self.out is not None:
            return self.out.array
        return like(self.argument.values, whole.owner).reshape(self.argument.shape)


def bytes_at(memory: HostView | Keys) -> Any:
    """Return memory as an array of bytes."""
    return bytes_from(memory.address, memory.nbytes)


def bytes_from(address: int, nbytes: int) -> Any:
    """Return memory as an array of bytes, without keeping it alive."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    raw: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(raw, np.uint8)


def like(model: HostView, raw: Any) -> Any:
    """Return bytes as an array of the library and type of ``model``."""
    array = model.array
    if isinstance(array, np.ndarray):
        return raw.view(array.dtype)
    if hasattr(array, "new_empty"):  # a torch tensor: its library is there
        torch: Any = sys.modules["torch"]
        if raw.size == 0:  # torch's stride of it is 0, which no other type may have
            return torch.empty(0, dtype=array.dtype)
        return torch.from_numpy(raw).view(array.dtype)
    return raw.view(model.dtype.name)
