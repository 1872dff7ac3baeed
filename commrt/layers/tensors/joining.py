# SPDX-License-Identifier: Apache-2.0
"""Tensors joined along a dimension, and operands of one function cut alike.

Within a parallel model, operands that lie in different ways are moved to where the
first one lies. Joined along a dimension that is cut, each operand is moved so that the
pieces of the result are even: no rank receives elements that its piece has not.
Elsewhere both raise UsageError.

Bytes: a rank receives of each operand what its target part has and its source lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_ranges, meet
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.elementwise import alike, same_grid
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.rules import takes

__all__ = ["cat"]


@takes(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Any], dim: int = 0) -> DistTensor:
    """Return tensors joined along a dimension; it lies as the first one."""
    for x in tensors:
        if not isinstance(x, DistTensor):
            raise UsageError(
                "cat: each operand must be a DistTensor; make plain ones such by "
                "DistTensor.from_whole"
            )
    first, at = tensors[0], dim % max(tensors[0].dim(), 1)
    grid = same_grid("cat", tensors)
    shapes = {(*x.shape[:at], *x.shape[at + 1 :]) for x in tensors}
    if len(shapes) > 1:
        raise UsageError(
            f"cat: shapes {[tuple(x.shape) for x in tensors]} differ in more than "
            f"dimension {dim}"
        )
    extents = [x.shape[at] for x in tensors]
    cut = first.placement.dims[at]
    if cut is not None and grid.size(cut.axes) == 1:
        cut = None
    targets = _pieces(grid, cut, extents)
    parts = alike(
        "cat",
        [
            (x, Placement(*_with(first.placement.dims, at, own)))
            for x, own in zip(tensors, targets, strict=True)
        ],
    )
    shape = [*first.shape]
    shape[at] = sum(extents)
    made = None if cut is None else Sharded(cut.axes)
    placement = Placement(*_with(first.placement.dims, at, made))
    return DistTensor(torch.cat([x.local for x in parts], at), shape, grid, placement)


def _pieces(
    grid: ProcessGrid, cut: Sharded | None, extents: Sequence[int]
) -> list[Sharded | None]:
    """Return the cut of each operand that makes the result's pieces even."""
    if cut is None:
        return [None] * len(extents)
    pieces = even_ranges(sum(extents), grid.size(cut.axes))
    found: list[Sharded | None] = []
    low = 0
    for extent in extents:
        shared = [meet(piece, (low, low + extent)) for piece in pieces]
        found.append(Sharded(cut.axes, sizes=tuple(b - a for a, b in shared)))
        low += extent
    return found


def _with(
    dims: Sequence[Sharded | None], at: int, cut: Sharded | None
) -> list[Sharded | None]:
    return [cut if number == at else dim for number, dim in enumerate(dims)]
