# SPDX-License-Identifier: Apache-2.0
"""Plans that the engine runs on the host, made of programs of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commrt import _native
from commrt.boxes.layouts import Block, Cyclic, Layout
from commrt.group.group import Group
from commrt.planning.host_plans import LANE_NBYTES, TransportParams
from commrt.schedule.boxes import LIMIT_NBYTES, Box, Move
from commrt.vocabulary.dtypes import DType, ReduceOp

__all__ = [
    "MOST_DIMS",
    "ArrayLayout",
    "Place",
    "box_template",
    "most_message_nbytes",
]

MOST_DIMS = 8
"""Most dimensions of an array; in a box, each may count as two."""
_SLOTS_NBYTES = 1 << 20
"""Payloads that may be unread at once: enough to pack ahead, and few enough to stay in
the cache for the next exchange."""
_FEWEST_SLOTS = 4
_SLOT_OVERHEAD_NBYTES = 192
"""Most bytes by which the engine rounds a slot up."""
_SLOT_STORES = 2
"""Bit of a store kind's code that concerns slots."""
_BY_LINK_CLASS = -1
_NOBODY = -1
"""The engine's number for no rank, no array and no number of a call."""


@dataclass(frozen=True)
class ArrayLayout:
    """Layout of an array in memory: element type and strides."""

    dtype: DType
    strides: tuple[int, ...]
    """Bytes from element to element, in each dimension."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a dimension that calls of one kind have at different numbers."""

    number: int
    """Which of the call's numbers."""
    offset: int = 0
    """Cells behind it."""

    def __sub__(self, cells: int) -> Place:
        return Place(self.number, self.offset - cells)


def most_message_nbytes(size: int) -> int:
    """Return the bytes that a message's box may touch, by the number of ranks.

    As many as there are other ranks may be unread at once, see ``schedule.boxes``.
    """
    return min(LIMIT_NBYTES, LANE_NBYTES // size - _SLOT_OVERHEAD_NBYTES)


def box_template(
    group: Group,
    moves: Sequence[Move],
    arrays: Sequence[tuple[DType, int]],
    *,
    coll: int,
    label: str,
    reduction: ReduceOp | None = None,
    stated: bool = False,
    facts: int = 0,
    layouts: tuple[Layout, Layout] | None = None,
) -> _native.BoxTemplate:
    """Return what makes the plans of calls with these moves.

    Their buffer is a table of the arrays' addresses.

    Args:
        group: the ranks.
        moves: this rank's. Where its boxes begin and end may be given as ``Place``.
        arrays: element type and number of dimensions of each.
        coll: the engine's code of the operation.
        label: the plans' name.
        reduction: how what arrives is combined with what is there; None: it is not.
        stated: as in ``schedule.boxes.compile_moves``.
        facts: a number of what the ranks have to agree on, besides the operation and
            the first array's type; messages carry it.
        layouts: those of array 0 and array 1, between which calls of any lengths move
            the whole array; instead of ``moves``.
    """
    transport = TransportParams()
    reduces = reduction is not None
    learns_from, _, (short, long, _) = transport.store_rule(
        group.facts.link_class, combines=False
    ).plain()
    return _native.make_box_template(
        rank=group.rank,
        size=group.size,
        coll=coll,
        label=label,
        redop=int(ReduceOp.SUM if reduction is None else reduction),
        reduces=reduces,
        stated=stated,
        limit_nbytes=most_message_nbytes(group.size),
        lane_nbytes=LANE_NBYTES,
        spins=_BY_LINK_CLASS,
        most_inline=transport.most_inline(reduces),
        slots_nbytes=_SLOTS_NBYTES,
        fewest_slots=_FEWEST_SLOTS,
        learns_from=learns_from,
        stores=[(a & _SLOT_STORES, b & _SLOT_STORES) for a, b in (short, long)],
        arrays=[(dtype.code, ndim) for dtype, ndim in arrays],
        facts=facts,
        moves=[
            (
                move.phase,
                move.number,
                _NOBODY if move.peer is None else move.peer,
                _end(move.source),
                _end(move.target),
            )
            for move in moves
        ],
        layouts=None if layouts is None else (_kind(layouts[0]), _kind(layouts[1])),
    )


def _kind(layout: Layout) -> tuple[list[int], list[tuple[list[int], int, bool]]]:
    """Return a layout without its lengths, as the engine takes it."""
    axes = []
    for kind in layout.dims:
        dims = [] if kind is None else [*kind.grid_dims]
        block = kind.block if isinstance(kind, Cyclic) else 0
        axes.append((dims, block, isinstance(kind, Block) and kind.sizes is not None))
    return [*layout.grid], axes


def _end(box: Box | None) -> tuple[Any, ...]:
    """Return one side of a move, as the engine takes it."""
    if box is None:
        return _NOBODY, [], [], [], []
    axes = box.axes or [(axis, 1) for axis in range(len(box.start))]
    return (
        box.array,
        [_place(each) for each in box.start],
        [_place(each) for each in box.stop],
        [axis for axis, _ in axes],
        [step for _, step in axes],
    )


def _place(given: int | Place) -> tuple[int, int]:
    if isinstance(given, Place):
        return given.offset, given.number
    return given, _NOBODY
