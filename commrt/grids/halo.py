# SPDX-License-Identifier: Apache-2.0
"""Halo exchange: the edges of a rank's block, to and from the ranks around it.

Each rank of a Cartesian grid holds a block of an array with a margin, the *halo*: in
every distributed dimension ``low`` cells before its own ones and ``high`` behind. An
exchange fills the halo with the neighbours' cells. Its reverse adds what the halo
holds to the cells that it stands for, at their owner: the adjoint of the exchange,
where halos collect contributions. The geometry is here; ``halo_calls`` has what users
call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from commrt.schedule.boxes import Box, Move

__all__ = ["HaloShape", "directions", "halo_moves"]


class Places(Protocol):
    """The shape of a halo on a grid of ranks."""

    @property
    def dims(self) -> tuple[int, ...]:
        """Ranks in each dimension."""
        ...

    def at_offset(self, rank: int, offset: Sequence[int]) -> int | None:
        """Return the rank there; None beyond an open end."""
        ...


@dataclass(frozen=True)
class HaloShape:
    """The facts that all ranks agree on."""

    widths: tuple[tuple[int, int], ...]
    """Cells before and behind a block, in each dimension of the grid."""
    axes: tuple[int, ...]
    """The arrays' dimension that each dimension of the grid distributes."""
    corners: bool
    """True if cells that lie beside the block in several dimensions move too."""
    direct: bool
    """True if these come from the rank that owns them, not through its neighbours."""
    in_order: bool = False
    """True to combine what comes direction by direction, not through neighbours."""


def directions(shape: HaloShape) -> list[tuple[int, ...]]:
    """Return the ways of cells, as offsets in the grid; the same on all ranks."""
    ndim = len(shape.widths)
    if shape.corners and shape.direct:
        every = itertools.product((-1, 0, 1), repeat=ndim)
        return [offset for offset in every if any(offset)]
    found = []
    for dim in range(ndim):
        for step in (-1, 1):
            found.append(tuple(step if each == dim else 0 for each in range(ndim)))
    return found


def halo_moves(
    grid: Places,
    rank: int,
    shape: HaloShape,
    arrays: Sequence[tuple[int, ...]],
    *,
    reverse: bool = False,
) -> list[Move]:
    """Return the moves of one rank; ``arrays`` are the shapes, halos included."""
    return list(_moves(grid, rank, shape, arrays, reverse))


def _moves(
    grid: Places,
    rank: int,
    shape: HaloShape,
    arrays: Sequence[tuple[int, ...]],
    reverse: bool,
) -> Iterator[Move]:
    ordered = shape.corners and not shape.direct
    ndim = len(shape.widths)
    for index, offset in enumerate(directions(shape)):
        dim = next(dim for dim, step in enumerate(offset) if step)
        phase = (ndim - 1 - dim if reverse else dim) if ordered else 0
        if shape.in_order:
            phase = index  # a cell has one contribution of each direction
        to = grid.at_offset(rank, offset)
        back = tuple(-step for step in offset)
        come = grid.at_offset(rank, back)
        for array, extents in enumerate(arrays):
            number = index * len(arrays) + array
            carried = _carried(grid, rank, shape, dim) if ordered else None
            edge = _edge(array, extents, shape, offset, carried)
            halo = _halo(array, extents, shape, offset, carried)
            sent, taken = (halo, edge) if reverse else (edge, halo)
            dest, source = (come, to) if reverse else (to, come)
            if dest == source == rank:
                yield Move(phase, number, None, sent, taken)
                continue
            if dest is not None:
                yield Move(phase, number, dest, sent, None)
            if source is not None:
                yield Move(phase, number, source, None, taken)


Sides = tuple[tuple[bool, bool], ...]


def _carried(grid: Places, rank: int, shape: HaloShape, dim: int) -> Sides:
    """Return of which earlier dimensions a message carries the halo along.

    Beyond an open end there is nothing that anybody has sent.
    """
    found = []
    for other in range(len(shape.widths)):
        sides = []
        for step in (-1, 1):
            beside = [step if each == other else 0 for each in range(len(shape.widths))]
            sides.append(other < dim and grid.at_offset(rank, beside) is not None)
        found.append((sides[0], sides[1]))
    return tuple(found)


def _edge(
    array: int,
    extents: tuple[int, ...],
    shape: HaloShape,
    offset: tuple[int, ...],
    carried: Sides | None,
) -> Box:
    """Return the own cells that the rank at ``offset`` has in its halo."""
    start, stop = _inner(extents, shape, carried)
    for dim, step in enumerate(offset):
        axis, (low, high) = shape.axes[dim], shape.widths[dim]
        if step > 0:
            start[axis], stop[axis] = extents[axis] - high - low, extents[axis] - high
        elif step < 0:
            start[axis], stop[axis] = low, low + high
    return Box(array, tuple(start), tuple(stop))


def _halo(
    array: int,
    extents: tuple[int, ...],
    shape: HaloShape,
    offset: tuple[int, ...],
    carried: Sides | None,
) -> Box:
    """Return the part of the halo that what moves in direction ``offset`` fills."""
    start, stop = _inner(extents, shape, carried)
    for dim, step in enumerate(offset):
        axis, (low, high) = shape.axes[dim], shape.widths[dim]
        if step > 0:
            start[axis], stop[axis] = 0, low
        elif step < 0:
            start[axis], stop[axis] = extents[axis] - high, extents[axis]
    return Box(array, tuple(start), tuple(stop))


def _inner(
    extents: tuple[int, ...], shape: HaloShape, carried: Sides | None
) -> tuple[list[int], list[int]]:
    """Return bounds of the own cells, with the halos that are carried along."""
    start, stop = [0] * len(extents), list(extents)
    for dim, (axis, (low, high)) in enumerate(
        zip(shape.axes, shape.widths, strict=True)
    ):
        below, above = carried[dim] if carried is not None else (False, False)
        start[axis] = 0 if below else low
        stop[axis] = extents[axis] - (0 if above else high)
    return start, stop
