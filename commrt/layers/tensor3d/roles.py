# SPDX-License-Identifier: Apache-2.0
"""The part that each axis of a grid has in a layer.

A grid has the axes ``data``, ``x``, ``y`` and ``z``; one that is missing has length 1.
Ranks along ``data`` and ``z`` have samples of their own, those along ``x`` and ``y``
have the same ones. A layer cuts its input features along ``y`` and its output features
along ``x``; a transposed layer does it the other way round. So the output of a layer
lies as the next, transposed layer takes its input. The weights of a layer are cut along
``z`` besides (Singh and Bhatele, "A 4D hybrid algorithm to scale parallel training to
thousands of GPUs", section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid

__all__ = [
    *("AXES", "LAYER_AXES", "SAMPLE_AXES"),
    *("Along", "GroupRoles", "Roles", "check_axes"),
]

AXES = ("data", "x", "y", "z")
"""The names that axes may have."""

LAYER_AXES = (*AXES, "expert", "tensor")
"""The names of all axes that layers with cut parameters know."""

SAMPLE_AXES = ("data", "z", "expert")
"""The axes along which ranks have samples of their own."""


class Along:
    """One axis of a grid, or several together, as a layer sees them.

    Args:
        grid: the ranks.
        names: the axes, the last one fastest; one that the grid lacks has length 1.
            None: one rank.
    """

    def __init__(self, grid: ProcessGrid, *names: str) -> None:
        self.name = " and ".join(names)
        self.axes = tuple(name for name in names if grid.shape.get(name, 1) > 1)
        """Those along which there are several ranks."""
        self._extents = tuple(grid.size(name) for name in self.axes)
        self.size: int = math.prod(self._extents)
        self.place: int = self.place_at(grid.coords)
        self.comm: Communicator | None = grid[self.axes] if self.axes else None
        """The ranks along the axes; None where there is one."""

    def place_at(self, coords: Mapping[str, int]) -> int:
        """Return the place along the axes of a rank with some coordinates."""
        found = 0
        for name, extent in zip(self.axes, self._extents, strict=True):
            found = found * extent + coords.get(name, 0)
        return found

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Along:
        """Return itself: a copied layer works on the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"<axis {self.name!r}, place {self.place} of {self.size}>"


class Roles:
    """The axes of a grid by what a layer uses them for.

    Args:
        grid: axes are among ``data``, ``x``, ``y`` and ``z``.
        transpose: True: input features are cut along ``x``, output features along
            ``y``.

    Raises UsageError for a grid with other axes.
    """

    what = "tensor3d"
    """The name in messages."""
    known_axes: tuple[str, ...] = AXES
    """The names that axes may have."""
    are_sums_marked = False
    """True if ``sync_gradients`` marks gradients, and refuses to sum them again."""

    def __init__(self, grid: ProcessGrid, transpose: bool = False) -> None:
        check_axes(self.what, grid, self.known_axes)
        self.grid = grid
        self.transpose = bool(transpose)
        row, column = Along(grid, "x"), Along(grid, "y")
        self.inputs, self.outputs = (row, column) if transpose else (column, row)
        self.depth = Along(grid, "z")
        self.is_alone = self.inputs.size * self.outputs.size * self.depth.size == 1

    def turned(self) -> Roles:
        """Return the roles of a layer with the other transposition."""
        return Roles(self.grid, not self.transpose)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Roles:
        """Return itself: a copied layer works on the same ranks."""
        return self


class GroupRoles(Roles):
    """The axes of a layer whose channels are in groups that are never summed.

    Ranks along ``x`` and ``y`` have groups of their own. Each computes its groups'
    outputs from their inputs, so no sum is made along these axes.

    Args:
        grid: axes are among ``data``, ``x``, ``y`` and ``z``.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        super().__init__(grid)
        self.inputs = self.outputs = Along(grid)
        self.groups = Along(grid, "x", "y")
        self.is_alone = self.groups.size * self.depth.size == 1


def check_axes(what: str, grid: ProcessGrid, known: Sequence[str] = AXES) -> None:
    """Raise UsageError unless ``grid`` is a ProcessGrid with axes that layers know."""
    if not isinstance(grid, ProcessGrid):
        example = ", ".join(f'"{name}": 1' for name in known[:-1])
        raise UsageError(
            f"{what}: grid={shown(grid)} must be a ProcessGrid, such as "
            f'ProcessGrid(comm, {{{example}, "{known[-1]}": 0}})'
        )
    unknown = [name for name in grid.axes if name not in known]
    if unknown:
        raise UsageError(
            f"{what}: the grid {grid.shape} has the axis {unknown[0]!r}; its axes must "
            f"be among {', '.join(known)}"
        )
