# SPDX-License-Identifier: Apache-2.0
"""Words by which a rank that has refused a call of boxes makes it (stand_ins.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from commrt.schedule.boxes import Move
from commrt.vocabulary.dtypes import DType, ReduceOp

__all__ = ["BOXES", "words_of_moves"]

BOXES = "boxes"
"""The kind of such words."""


def words_of_moves(
    what: str,
    backend: str,
    phases: Sequence[Sequence[Move]],
    *,
    coll: int,
    dtype: DType,
    reduction: ReduceOp | None = None,
    facts: int = 0,
    stated: bool = False,
    compared: int = 0,
) -> str:
    """Return the words of a call; the boxes of its moves have one dimension.

    ``compared`` is the number of facts that the ranks compare on the way; the rest is
    as in ``box_template``.
    """
    said = []
    for moves in phases:
        messages = []
        for move in moves:
            box = move.source or move.target
            if move.peer is not None and box is not None:
                leaves = move.source is not None
                messages.append((move.peer, move.number, leaves, box.count))
        said.append(messages)
    combined = int(ReduceOp.SUM if reduction is None else reduction)
    return json.dumps(
        [
            *(BOXES, what, backend, coll, dtype.code, combined),
            *(facts, stated, compared, said),
        ]
    )
