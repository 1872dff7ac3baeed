# SPDX-License-Identifier: Apache-2.0
"""Pieces of a sparse vector, the switch from sparse to dense, and their memory.

A piece holds the elements of an index range: as entries (indices and values), or dense,
every element. It is dense from where its entries would take more bytes. Two pieces of
one range are merged; the test takes the sum of their entries, which is known before the
work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from commrt import _native
from commrt.errors import BufferError_
from commrt.sparse.coordinates import WIDE_NBYTES, words_of
from commrt.sparse.memory import Pool
from commrt.sparse.vector import SparseArgument
from commrt.vocabulary.dtypes import DType

__all__ = ["Elements", "Piece", "even_bounds"]

_kernels = _native.sparse
_MARK_ELEMENTS = 96
"""Elements per entry up to which marking beats merging.

docs/internals/sparse-sums.md has the figures."""
_SUMMED = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements with indices from ``first`` to below ``last``."""

    first: int
    last: int
    dense: bool
    """True if every element is there, instead of entries."""
    count: int
    """Entries; of a dense piece the elements."""
    indices: int
    """Address; 0 where dense."""
    values: int
    """Address."""
    owner: Any
    """Keeps the memory alive."""

    @property
    def length(self) -> int:
        """Elements of the range."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Elements:
    """The types of indices and values, and the operations on pieces."""

    index_nbytes: int
    dtype: DType
    pool: Pool
    in_order: bool = False
    """True if several pieces are added from the left, one after the other."""

    @classmethod
    def of(
        cls, what: str, argument: SparseArgument, pool: Pool, in_order: bool = False
    ) -> Elements:
        """Return those of an argument; BufferError_ where the type has no sum here."""
        if argument.dtype.name not in _SUMMED:
            raise BufferError_(
                f"{what}: values have dtype {argument.dtype.name}, which sparse "
                f"vectors cannot have; supported: {', '.join(sorted(_SUMMED))}"
            )
        return cls(argument.index_nbytes, argument.dtype, pool, in_order)

    @property
    def entry_nbytes(self) -> int:
        """Bytes of an index and its value."""
        return self.index_nbytes + self.dtype.itemsize

    @property
    def is_wide(self) -> bool:
        """True if indices have two words: the array has 2**63 elements or more.

        Then no piece of it is dense.
        """
        return self.index_nbytes == WIDE_NBYTES

    @property
    def index_type(self) -> np.dtype[Any]:
        """numpy's type of the indices."""
        if self.is_wide:
            return np.dtype([("low", np.uint64), ("high", np.int64)])
        return np.dtype(f"int{8 * self.index_nbytes}")

    def dense_pays(self, count: int, length: int) -> bool:
        """Return whether so many entries take as many bytes as all elements."""
        return count * self.entry_nbytes >= length * self.dtype.itemsize

    # -- memory --------------------------------------------------------------------

    def entries(self, count: int) -> tuple[Any, Any]:
        """Return room for indices, and for values as bytes."""
        indices = self.pool.take(count * self.index_nbytes).view(self.index_type)
        return indices, self.pool.take(count * self.dtype.itemsize)

    def elements(self, length: int, *, zero: bool) -> Any:
        """Return room for so many elements, as bytes."""
        memory = self.pool.take(length * self.dtype.itemsize)
        if zero:
            memory.fill(0)
        return memory

    def piece(self, first: int, last: int, room: tuple[Any, Any], count: int) -> Piece:
        """Return the piece whose entries lie at the beginning of ``room``."""
        indices, values = room
        addresses = indices.ctypes.data, values.ctypes.data
        return Piece(first, last, False, count, *addresses, room)

    def dense_piece(self, first: int, last: int, memory: Any) -> Piece:
        """Return the piece of all elements that ``memory`` holds."""
        return Piece(first, last, True, last - first, 0, memory.ctypes.data, memory)

    def empty_piece(self, first: int, last: int, dense: bool, count: int) -> Piece:
        """Return a piece to receive into."""
        if dense:
            memory = self.elements(last - first, zero=False)
            return self.dense_piece(first, last, memory)
        return self.piece(first, last, self.entries(count), count)

    # -- what is done with pieces ----------------------------------------------------

    def whole(self, argument: SparseArgument) -> Piece:
        """Return an argument as a piece."""
        owner = argument.indices.owner, argument.values.owner
        addresses = argument.indices.address, argument.values.address
        return Piece(0, argument.length, False, argument.count, *addresses, owner)

    def part(self, piece: Piece, low: int, high: int) -> Piece:
        """Return some of a piece's entries, by their numbers."""
        indices = piece.indices + low * self.index_nbytes
        values = piece.values + low * self.dtype.itemsize
        count = high - low
        return Piece(
            piece.first, piece.last, False, count, indices, values, piece.owner
        )

    def copy(self, piece: Piece, to: Piece) -> None:
        """Copy a piece to where another of its size lies."""
        if piece.values != to.values:
            nbytes = piece.count * self.dtype.itemsize
            ctypes.memmove(to.values, piece.values, nbytes)
        if not piece.dense and piece.indices != to.indices:
            nbytes = piece.count * self.index_nbytes
            ctypes.memmove(to.indices, piece.indices, nbytes)

    def sum_into(self, pieces: Sequence[Piece], to: Piece) -> Piece:
        """Return the sum of entries of one range, in the memory of ``to``.

        It has room for all entries, and the range; ``pieces`` are neighbours in order.
        """
        found = [piece for piece in pieces if piece.count]
        if len(found) > 2 and to.count * _MARK_ELEMENTS >= to.length:
            return replace(to, count=self._marked(found, to))
        while len(found) > 2:
            found = self._fewer(found)
        if len(found) == 2:
            return replace(to, count=self._merged(found[0], found[1], to))
        for piece in found:
            self.copy(piece, to)
        return replace(to, count=sum(piece.count for piece in found))

    def _marked(self, pieces: Sequence[Piece], to: Piece) -> int:
        lists = [(piece.indices, piece.values, piece.count) for piece in pieces]
        sizes = self.index_nbytes, self.dtype.code
        return _kernels.sum(*sizes, lists, to.first, to.last, to.indices, to.values)

    def _merged(self, a: Piece, b: Piece, to: Piece) -> int:
        lists = a.indices, a.values, a.count, b.indices, b.values, b.count
        if self.is_wide:
            return _kernels.merge_keys(self.dtype.code, *lists, to.indices, to.values)
        types = self.index_nbytes, self.dtype.code
        return _kernels.merge(*types, *lists, to.indices, to.values)

    def _fewer(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return neighbours merged: all pairs of them, or in order the first only."""
        if self.in_order:
            return [self.merge(pieces[0], pieces[1]), *pieces[2:]]
        pairs = zip(pieces[::2], pieces[1::2], strict=False)
        merged = [self.merge(a, b) for a, b in pairs]
        return merged + list(pieces[2 * len(merged) :])

    def merge(self, a: Piece, b: Piece) -> Piece:
        """Return the sum of two pieces of one range.

        Dense pieces are the operation's own: one of them may become the sum.
        """
        if b.dense and not a.dense:
            a, b = b, a
        if not a.dense and self.dense_pays(a.count + b.count, a.length):
            a = self.densified(a)
        if a.dense:
            self.add_into(a, b)
            return a
        if not (a.count and b.count):
            return a if a.count else b
        total = a.count + b.count
        to = self.piece(a.first, a.last, self.entries(total), total)
        return replace(to, count=self._merged(a, b, to))

    def merge_all(self, pieces: Sequence[Piece]) -> Piece:
        """Return the sum of pieces of one range, neighbours first.

        Where their entries together would take more bytes than all elements, they are
        added into a dense piece one after the other.
        """
        found = list(pieces)
        total = sum(piece.count for piece in found)
        if len(found) > 1 and self.dense_pays(total, found[0].length):
            found[0] = self.densified(found[0])
            for piece in found[1:]:
                found[0] = self.merge(found[0], piece)
            return found[0]
        some = [piece for piece in found if piece.count]
        if len(some) < 2:
            return some[0] if some else found[0]
        first, last = found[0].first, found[0].last
        return self.sum_into(some, self.piece(first, last, self.entries(total), total))

    def add_into(self, dense: Piece, x: Piece) -> None:
        """Add the elements of ``x`` to a dense piece whose range contains its range."""
        start = dense.values + (x.first - dense.first) * self.dtype.itemsize
        if x.dense:
            _kernels.add_dense(self.dtype.code, x.values, start, x.count)
            return
        sizes = self.index_nbytes, self.dtype.code
        _kernels.add_into(*sizes, x.indices, x.values, x.count, x.first, start)

    def densified(self, piece: Piece) -> Piece:
        """Return a piece with every element."""
        if piece.dense:
            return piece
        dense = self.dense_piece(
            piece.first, piece.last, self.elements(piece.length, zero=True)
        )
        self.add_into(dense, piece)
        return dense

    def sparsified(self, piece: Piece) -> Piece:
        """Return a piece with entries: of a dense one those that are not zero."""
        if not piece.dense:
            return piece
        room = self.entries(piece.length)
        count = _kernels.sparsify(
            self.index_nbytes,
            self.dtype.code,
            piece.values,
            piece.length,
            piece.first,
            room[0].ctypes.data,
            room[1].ctypes.data,
        )
        return self.piece(piece.first, piece.last, room, count)

    def split(self, piece: Piece, bounds: Sequence[int]) -> list[Piece]:
        """Return the pieces between ``bounds``, which begin and end with its own."""
        ranges = list(pairwise(bounds))
        if piece.dense:
            size = self.dtype.itemsize
            return [
                replace(
                    piece,
                    first=first,
                    last=last,
                    count=last - first,
                    values=piece.values + (first - piece.first) * size,
                )
                for first, last in ranges
            ]
        offsets = self.offsets(piece, bounds)
        found = []
        for (first, last), at, end in zip(ranges, offsets, offsets[1:], strict=False):
            found.append(replace(self.part(piece, at, end), first=first, last=last))
        return found

    def offsets(self, piece: Piece, bounds: Sequence[int]) -> list[int]:
        """Return for each of ascending bounds how many entries lie below it."""
        if self.is_wide:
            words = [words_of(bound) for bound in bounds]
            wide: list[int] = _kernels.split_keys(piece.indices, piece.count, words)
            return wide
        found: list[int] = _kernels.split(
            self.index_nbytes, piece.indices, piece.count, bounds
        )
        return found


def even_bounds(first: int, last: int, parts: int) -> list[int]:
    """Return the ``parts`` + 1 bounds of nearly equal index ranges."""
    length = last - first
    return [first + length * part // parts for part in range(parts + 1)]
