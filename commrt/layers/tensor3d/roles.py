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

from collections.abc import Mapping
from typing import Any

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid

__all__ = ["AXES", "Along", "Roles", "check_axes"]

AXES = ("data", "x", "y", "z")
"""The names that axes may have."""


class Along:
    """One axis of a grid, as a layer sees it.

    Args:
        grid: the ranks.
        name: the axis; one that the grid lacks has length 1.
    """

    def __init__(self, grid: ProcessGrid, name: str) -> None:
        self.name = name
        self.size: int = grid.shape.get(name, 1)
        self.place: int = grid.coords.get(name, 0)
        self.comm: Communicator | None = grid[name] if self.size > 1 else None
        """The ranks along the axis; None where there is one."""

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

    def __init__(self, grid: ProcessGrid, transpose: bool = False) -> None:
        check_axes("tensor3d", grid)
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


def check_axes(what: str, grid: ProcessGrid) -> None:
    """Raise UsageError unless ``grid`` is a ProcessGrid with axes that layers know."""
    if not isinstance(grid, ProcessGrid):
        raise UsageError(
            f"{what}: grid={shown(grid)} must be a ProcessGrid, such as "
            f'ProcessGrid(comm, {{"data": 1, "z": 1, "y": 1, "x": 0}})'
        )
    unknown = [name for name in grid.axes if name not in AXES]
    if unknown:
        raise UsageError(
            f"{what}: the grid {grid.shape} has the axis {unknown[0]!r}; its axes must "
            f"be among {', '.join(AXES)}"
        )
