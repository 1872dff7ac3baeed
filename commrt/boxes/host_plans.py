# SPDX-License-Identifier: Apache-2.0
"""Plans that the engine runs on the host, made of programs of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt import _native
from commrt.group.group import Group
from commrt.planning.host_plans import LANE_NBYTES, TransportParams
from commrt.schedule.boxes import LIMIT_NBYTES, BoxProgram, Move, compile_moves
from commrt.vocabulary.dtypes import DType, ReduceOp

__all__ = ["MOST_DIMS", "ArrayLayout", "box_plan", "compile_for"]

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


@dataclass(frozen=True)
class ArrayLayout:
    """Layout of an array in memory: element type and strides."""

    dtype: DType
    strides: tuple[int, ...]
    """Bytes from element to element, in each dimension."""


def compile_for(
    group: Group,
    moves: Sequence[Move],
    itemsizes: Sequence[int],
    *,
    reduces: bool,
    stated: bool = False,
) -> BoxProgram:
    """Return this rank's program, with messages that fit into its memory for them.

    As many as there are other ranks may be unread at once, see ``schedule.boxes``.
    """
    limit = min(LIMIT_NBYTES, LANE_NBYTES // group.size - _SLOT_OVERHEAD_NBYTES)
    return compile_moves(
        moves,
        itemsizes,
        rank=group.rank,
        size=group.size,
        reduces=reduces,
        stated=stated,
        limit=limit,
    )


def box_plan(
    group: Group,
    program: BoxProgram,
    layouts: Sequence[ArrayLayout],
    *,
    coll: int,
    label: str,
    reduction: ReduceOp | None = None,
) -> Any:
    """Return the engine's plan; its buffer is a table of the arrays' addresses."""
    transport = TransportParams()
    slots = _SLOTS_NBYTES // max(1, program.longest_nbytes)
    slots = max(slots, program.fewest_slots, _FEWEST_SLOTS)
    store, adaptive = transport.stores(
        program.longest_nbytes, 0, group.facts.link_class, combines=False
    )
    return _native.make_box_plan(
        group,
        coll=coll,
        label=label,
        redop=int(ReduceOp.SUM if reduction is None else reduction),
        reduces=reduction is not None,
        boxes=_table(program, layouts),
        steps=program.steps,
        deps=program.deps,
        dep_ptr=program.dep_ptr,
        peers=list(program.peers),
        lane_nbytes=LANE_NBYTES,
        most_slots=slots,
        ahead=program.ahead,
        spins=_BY_LINK_CLASS,
        most_inline=transport.most_inline(reduction is not None),
        store=store & _SLOT_STORES,
        adaptive=adaptive & _SLOT_STORES,
    )


def _table(program: BoxProgram, layouts: Sequence[ArrayLayout]) -> Any:
    """Return the engine's rows: array, dtype, offset, shape, strides."""
    ndim = max((len(box.start) for box in program.boxes), default=0)
    table = np.zeros((len(program.boxes), 3 + 2 * ndim), np.int64)
    table[:, 3 : 3 + ndim] = 1
    for row, box in zip(table, program.boxes, strict=True):
        layout = layouts[box.array]
        rank = len(box.start)
        strides: Sequence[int] = layout.strides
        if box.axes is not None:
            strides = [layout.strides[axis] * step for axis, step in box.axes]
        offset = sum(a * b for a, b in zip(box.start, strides, strict=True))
        row[:3] = box.array, layout.dtype.code, offset
        row[3 + ndim - rank : 3 + ndim] = box.shape
        row[3 + 2 * ndim - rank :] = strides
    return table
