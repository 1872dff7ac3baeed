# SPDX-License-Identifier: Apache-2.0
"""The part that each axis of a grid plays in a layer of a graph network.

A layer computes A F W. The *inner* axis cuts the nodes that are summed over: A's
columns and F's rows. The *feature* axis cuts F's columns and W's rows. The *row* axis
cuts A's rows, and with them the rows of the result; the inner axis cuts its columns.

The next layer takes the result where it lies. So its inner axis is this one's row axis,
and its feature axis this one's inner axis: roles come back after three layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import Placement

__all__ = ["Roles", "roles_of"]


@dataclass(frozen=True)
class Roles:
    """The axis of each role, and where a layer's tensors lie."""

    inner: str
    features: str
    rows: str

    @cached_property
    def given(self) -> Placement:
        """Where a layer's input lies: copies along the row axis."""
        return Placement(self.inner, self.features)

    @cached_property
    def resting(self) -> Placement:
        """Where an input lies that is kept once in the grid."""
        return Placement((self.inner, self.rows), self.features)

    @cached_property
    def aggregated(self) -> Placement:
        """Where A F lies: copies along the inner axis."""
        return Placement(self.rows, self.features)

    @cached_property
    def weight(self) -> Placement:
        """Where a weight lies, once in the grid."""
        return Placement((self.features, self.rows), self.inner)

    @cached_property
    def bias(self) -> Placement:
        """Where a bias lies: copies along the two other axes."""
        return Placement(self.inner)

    @cached_property
    def result(self) -> Placement:
        """Where the layer's result lies: copies along the feature axis."""
        return Placement(self.rows, self.inner)


def roles_of(grid: ProcessGrid, layer_index: int) -> Roles:
    """Return the roles of the grid's axes in a layer; UsageError for other grids."""
    if not isinstance(grid, ProcessGrid) or len(grid.axes) != 3:
        raise UsageError(
            f"graph layers: grid={shown(grid)} must be a ProcessGrid with three axes, "
            f"such as {{'x': 2, 'y': 2, 'z': 2}}; axes of 1 rank are allowed"
        )
    if type(layer_index) is not int or layer_index < 0:
        raise UsageError(
            f"graph layers: layer_index={shown(layer_index)} must be the number of the "
            f"layer in its network, from 0"
        )
    return _roles(*grid.axes, layer_index % 3)


@cache
def _roles(x: str, y: str, z: str, turn: int) -> Roles:
    """Return the same object for equal axes: layers ask for it in every step."""
    return (Roles(x, y, z), Roles(z, x, y), Roles(y, z, x))[turn]
