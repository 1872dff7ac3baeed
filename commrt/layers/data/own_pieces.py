# SPDX-License-Identifier: Apache-2.0
"""Parameters of which ranks have different pieces, or different ones altogether.

Experts of a mixture, tables of embeddings and cut weights lie on different ranks. Their
layers note on each parameter how it is cut (``grid_cut``). A sum over all ranks would
add gradients of different parameters.
"""

from __future__ import annotations

from typing import Any

__all__ = ["advice", "place_of"]


def place_of(parameter: Any) -> tuple[tuple[str, int], ...]:
    """Return which piece this rank has: its place along each axis that cuts; local.

    Ranks have the same piece where they return the same. Empty: nothing cuts it.
    """
    cut = getattr(parameter, "grid_cut", None)
    if cut is None:
        return ()
    return tuple((axis, cut.grid.coords[axis]) for axis in sorted(cut.axes))


def advice(parameter: Any) -> str:
    """Return the end of a message about such a parameter."""
    axes = " and ".join(parameter.grid_cut.axes)
    return (
        f"ranks along {axes} have different pieces of it, or different parameters, "
        f"whose gradients must not be added up; call sync_gradients of the layer's "
        f"package in place of this, or give ranks that have the same piece"
    )
