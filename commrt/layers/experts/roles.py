# SPDX-License-Identifier: Apache-2.0
"""The part that each axis of a grid has in a mixture of experts.

Ranks along ``data`` and ``expert`` have tokens of their own, those along ``tensor`` the
same ones. Ranks along ``expert`` have experts of their own, those along ``data`` the
same ones. Ranks along ``tensor`` have parts of each expert's hidden features.
"""

from __future__ import annotations

from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.roles import Along, Roles

__all__ = ["AXES", "ExpertRoles"]

AXES = ("data", "expert", "tensor")
"""The names that axes may have; one that is missing has length 1."""


class ExpertRoles(Roles):
    """The axes of a grid by what a mixture of experts uses them for.

    Args:
        grid: axes are among ``data``, ``expert`` and ``tensor``.

    Raises UsageError for a grid with other axes.
    """

    what = "MoE"
    known_axes = AXES
    are_sums_marked = True

    def __init__(self, grid: ProcessGrid) -> None:
        super().__init__(grid)
        self.experts = Along(grid, "expert")
        self.tensor = Along(grid, "tensor")
        self.tokens = Along(grid, "data", "expert")
        """Ranks with tokens of their own, in the order of tokens."""
        self.nobody = Along(grid)
