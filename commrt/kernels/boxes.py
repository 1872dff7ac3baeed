# SPDX-License-Identifier: Apache-2.0
"""Tables that tell one launch which boxes of arrays move, and where in the buffer.

A buffer holds the elements of its boxes one box after the other, each in C order and
without gaps, as the messages of the host's engine do. Tables depend on shapes and
strides only: the arrays' addresses come with each launch.

    table = move_table(boxes, [array.strides], [array.itemsize])   # pack and unpack
    table = combine_table(boxes, [array.strides], [array.itemsize])

Boxes that are combined may overlap: a cell at the edge of a block has contributions
from several neighbours. Two threads must not add to the same element, so the boxes are
cut into cells that do not overlap, each with the list of what is combined with it, in
the order of the boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from commrt._native import Device
from commrt.errors import UsageError
from commrt.vocabulary.dtypes import DType, ReduceOp

__all__ = [
    "MOST_ARRAYS",
    "MOST_DIMS",
    "BoxKind",
    "BoxTable",
    "combine_table",
    "move_table",
]

MOST_DIMS = 8
"""Dimensions of a box that are left when those without a gap between are one."""
MOST_ARRAYS = 16
"""Arrays of one launch."""
_LONGEST_UNIT = 16
_BOX = np.dtype(
    [
        ("first", "u8"),
        ("offset", "i8"),
        ("array", "u4"),
        ("unit", "u4"),
        ("ndim", "u4"),
        ("term", "u4"),
        ("terms", "u4"),
        ("unused", "u4"),
        ("shape", "u8", MOST_DIMS),
        ("strides", "i8", MOST_DIMS),
    ]
)
_TERM = np.dtype([("offset", "i8"), ("strides", "i8", MOST_DIMS)])


class BoxKind(IntEnum):
    """The kinds of launches; each value is the engine's code."""

    PACK = 0
    UNPACK = 1
    COMBINE = 2


class BoxLike(Protocol):
    """Elements ``start`` to ``stop`` of an array, as schedule.boxes.Box."""

    @property
    def array(self) -> int:
        """The array's number."""
        ...

    @property
    def start(self) -> tuple[int, ...]:
        """The first element."""
        ...

    @property
    def stop(self) -> tuple[int, ...]:
        """Index behind the last element, in each dimension."""
        ...

    @property
    def axes(self) -> tuple[tuple[int, int], ...] | None:
        """The array's dimension and step of each of the box's; None: the same."""
        ...


@dataclass(frozen=True)
class BoxTable:
    """Arguments of a launch of boxes, besides the buffer and the arrays."""

    content: bytes
    """Bytes to copy to memory that the device reaches, at a multiple of 16."""
    terms_at: int
    """Offset of the terms in the content, behind the boxes."""
    num_boxes: int
    units: int
    """Units of work, which threads take one at a time."""
    nbytes: int
    """Bytes of the buffer."""

    def launch(
        self,
        device: Device,
        kind: BoxKind,
        buffer: int,
        arrays: Sequence[int],
        table: int,
        stream: int,
        reduction: tuple[ReduceOp, DType] | None = None,
    ) -> None:
        """Give a stream the launch.

        ``buffer``, ``arrays`` and ``table``, where a copy of ``content`` lies until the
        stream has come there, are addresses; ``reduction`` is that of COMBINE.
        """
        op, dtype = (0, 0) if reduction is None else (reduction[0], reduction[1].code)
        device.launch_boxes(
            int(kind),
            buffer,
            self.nbytes,
            list(arrays),
            table,
            table_nbytes=len(self.content),
            terms_at=self.terms_at,
            num_boxes=self.num_boxes,
            units=self.units,
            stream=stream,
            op=int(op),
            dtype=dtype,
        )


@dataclass(frozen=True)
class _Cell:
    """A part of an array, and where the same elements are in the buffer; in bytes."""

    array: int
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    terms: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class _Placed:
    """A box, and where it lies in the buffer."""

    box: BoxLike
    strides: tuple[int, ...]
    """Bytes from element to element in the array, in each dimension."""
    at: int
    """First byte in the buffer."""
    in_buffer: tuple[int, ...]
    """Strides there."""

    def cell(self, start: Sequence[int], stop: Sequence[int]) -> _Cell:
        """Return the part of the box between these places of the array."""
        return _Cell(
            self.box.array,
            tuple(b - a for a, b in zip(start, stop, strict=True)),
            _dot(start, self.strides),
            self.strides,
            (self.term(start),),
        )

    def term(self, start: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the offset in the buffer of that element, and the strides."""
        away = [a - b for a, b in zip(start, self.box.start, strict=True)]
        return self.at + _dot(away, self.in_buffer), self.in_buffer


def move_table(
    boxes: Sequence[BoxLike],
    strides: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
) -> BoxTable:
    """Return the table of a pack or an unpack of ``boxes``, which do not overlap.

    ``strides``, in bytes, and ``itemsizes`` are those of each array.
    """
    placed, nbytes = _placed(boxes, strides, itemsizes)
    cells = [one.cell(one.box.start, one.box.stop) for one in placed]
    units = [_in_units(cell, itemsizes[cell.array]) for cell in cells]
    return _table(units, nbytes)


def combine_table(
    boxes: Sequence[BoxLike],
    strides: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
) -> BoxTable:
    """Return the table that combines what a buffer holds with ``boxes``.

    These may overlap; then an element is combined in the order of the boxes.
    """
    placed, nbytes = _placed(boxes, strides, itemsizes)
    cells: list[_Cell] = []
    for array in sorted({one.box.array for one in placed}):
        here = [one for one in placed if one.box.array == array]
        if len(here) > 1 and any(one.box.axes is not None for one in here):
            raise UsageError(
                "boxes whose dimensions are not their array's cannot be combined in "
                "one launch, as they may overlap: launch them one by one"
            )
        cells += _without_overlaps(here)
    return _table([(_merged(c), itemsizes[c.array]) for c in cells], nbytes)


def _dot(numbers: Sequence[int], strides: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(numbers, strides, strict=True))


def _placed(
    boxes: Sequence[BoxLike],
    strides: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
) -> tuple[list[_Placed], int]:
    """Return the boxes that have elements, each behind the one before."""
    if len(strides) > MOST_ARRAYS:
        raise UsageError(
            f"boxes of {len(strides)} arrays: one launch takes {MOST_ARRAYS} at most, "
            f"so use several launches"
        )
    placed = []
    at = 0
    for box in boxes:
        shape = [b - a for a, b in zip(box.start, box.stop, strict=True)]
        if min(shape, default=1) < 1:
            continue
        own = strides[box.array]
        if box.axes is not None:
            own = [own[axis] * step for axis, step in box.axes]
        in_buffer = []
        nbytes = itemsizes[box.array]
        for extent in reversed(shape):
            in_buffer.append(nbytes)
            nbytes *= extent
        placed.append(_Placed(box, tuple(own), at, tuple(reversed(in_buffer))))
        at += nbytes
    return placed, at


def _without_overlaps(placed: list[_Placed]) -> Iterator[_Cell]:
    """Yield the parts of one array that belong to the same boxes."""
    if placed:
        yield from _cut(placed, [], [])


def _cut(placed: list[_Placed], start: list[int], stop: list[int]) -> Iterator[_Cell]:
    dim = len(start)
    if len(placed) == 1:  # nothing overlaps any more
        box = placed[0].box
        yield placed[0].cell([*start, *box.start[dim:]], [*stop, *box.stop[dim:]])
        return
    if dim == len(placed[0].box.start):
        first = placed[0].cell(start, stop)
        terms = tuple(one.term(start) for one in placed)
        yield _Cell(first.array, first.shape, first.offset, first.strides, terms)
        return
    cuts = {at for one in placed for at in (one.box.start[dim], one.box.stop[dim])}
    edges = sorted(cuts)
    for low, high in itertools.pairwise(edges):
        inside = [
            one
            for one in placed
            if one.box.start[dim] <= low and high <= one.box.stop[dim]
        ]
        if inside:
            yield from _cut(inside, [*start, low], [*stop, high])


def _merged(cell: _Cell) -> _Cell:
    """Return the same with dimensions that follow without a gap, everywhere, as one."""
    walks = [cell.strides, *(strides for _, strides in cell.terms)]
    shape: list[int] = []
    kept: list[list[int]] = [[] for _ in walks]
    for dim, extent in enumerate(cell.shape):
        if extent == 1:
            continue
        if shape and all(
            own[-1] == walk[dim] * extent for own, walk in zip(kept, walks, strict=True)
        ):
            shape[-1] *= extent
            for own, walk in zip(kept, walks, strict=True):
                own[-1] = walk[dim]
            continue
        shape.append(extent)
        for own, walk in zip(kept, walks, strict=True):
            own.append(walk[dim])
    terms = tuple(
        (offset, tuple(own))
        for (offset, _), own in zip(cell.terms, kept[1:], strict=True)
    )
    return _Cell(cell.array, tuple(shape), cell.offset, tuple(kept[0]), terms)


def _in_units(cell: _Cell, itemsize: int) -> tuple[_Cell, int]:
    """Return a cell that is moved, with its rows in words as long as they allow."""
    cell = _merged(cell)
    ((at, in_buffer),) = cell.terms
    shape, strides = list(cell.shape), list(cell.strides)
    outer = list(in_buffer)
    row = itemsize
    if shape and strides[-1] == outer[-1] == itemsize:
        row *= shape.pop()
        strides.pop()
        outer.pop()
    unit = math.gcd(_LONGEST_UNIT, row, cell.offset, at, *strides, *outer)
    if row > unit:
        shape.append(row // unit)
        strides.append(unit)
        outer.append(unit)
    terms = ((at, tuple(outer)),)
    return _Cell(cell.array, tuple(shape), cell.offset, tuple(strides), terms), unit


def _table(cells: Sequence[tuple[_Cell, int]], nbytes: int) -> BoxTable:
    """Return the cells, each with the bytes of its unit, as kernels read them."""
    boxes: Any = np.zeros(len(cells), _BOX)
    terms: Any = np.zeros(sum(len(cell.terms) for cell, _ in cells), _TERM)
    units = term = 0
    for row, (cell, unit) in zip(boxes, cells, strict=True):
        ndim = len(cell.shape)
        if ndim > MOST_DIMS:
            raise UsageError(
                f"a box of {ndim} dimensions with gaps between them: one launch moves "
                f"boxes of {MOST_DIMS} at most, so cut it into several"
            )
        row["first"], row["offset"], row["array"] = units, cell.offset, cell.array
        row["unit"], row["ndim"] = unit, ndim
        row["term"], row["terms"] = term, len(cell.terms)
        row["shape"][:ndim], row["strides"][:ndim] = cell.shape, cell.strides
        for offset, strides in cell.terms:
            terms[term]["offset"] = offset
            terms[term]["strides"][:ndim] = strides
            term += 1
        units += math.prod(cell.shape)
    return BoxTable(
        boxes.tobytes() + terms.tobytes(), boxes.nbytes, len(cells), units, nbytes
    )
