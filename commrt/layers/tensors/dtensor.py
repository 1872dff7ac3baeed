# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors as torch's DTensors and back, without copying.

torch cuts a dimension as ``torch.chunk`` does: pieces of ceil(n / p) elements, the last
ones shorter or empty. Such pieces are ``Sharded(axis, sizes=...)`` here. A cut along
several dimensions of a mesh is cut again within each piece there, which is the same
only where the pieces are even.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.placement import Placement, Sharded

__all__ = ["chunks", "from_dtensor", "to_dtensor"]


def chunks(extent: int, places: int) -> tuple[int, ...]:
    """Return the sizes of torch's pieces of a dimension."""
    most = -(-extent // places)
    return tuple(min(max(extent - most * at, 0), most) for at in range(places))


def from_dtensor(x: Any, grid: ProcessGrid) -> DistTensor:
    """Return a DTensor on a grid of the same axes, with its memory; differentiable.

    Gradients lie as here: whole along axes that cut nothing. Raises UsageError for a
    mesh of other names or places than ``grid``, and for placements that have no
    counterpart.
    """
    if not isinstance(x, DTensor):
        raise UsageError(f"from_dtensor: {type(x).__name__} is no DTensor")
    mesh = x.device_mesh
    names = mesh.mesh_dim_names
    here = mesh.get_coordinate()
    if (
        names != grid.axes
        or tuple(mesh.mesh.shape) != tuple(grid.shape.values())
        or here is None
        or tuple(here) != tuple(grid.coords.values())
    ):
        raise UsageError(
            f"from_dtensor: the mesh {mesh} is not {grid}: make the grid by "
            f"ProcessGrid.from_device_mesh, or the mesh by grid.device_mesh()"
        )
    cutting: dict[int, list[str]] = {}
    partial = []
    for axis, placement in zip(grid.axes, x.placements, strict=True):
        if type(placement) is Shard:
            cutting.setdefault(placement.dim % x.dim(), []).append(axis)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            partial.append(axis)
        elif type(placement) is not Replicate:
            raise UsageError(f"from_dtensor: {placement} has no counterpart")
    dims: list[Sharded | None] = [None] * x.dim()
    for number, axes in cutting.items():
        dims[number] = _as_torch_cuts(axes, grid, x.shape[number])
    gradients = [
        Shard(p.dim) if type(p) is Shard else Replicate() for p in x.placements
    ]
    local = x.to_local(grad_placements=gradients)
    return DistTensor(local, x.shape, grid, Placement(*dims, partial=partial))


def _as_torch_cuts(axes: list[str], grid: ProcessGrid, extent: int) -> Sharded:
    """Return torch's pieces of a dimension along several axes, one within the other."""
    sizes: tuple[int, ...] = (extent,)
    for axis in axes:
        sizes = tuple(part for size in sizes for part in chunks(size, grid.size(axis)))
    return Sharded(tuple(axes), sizes=sizes)


def to_dtensor(x: DistTensor, mesh: Any) -> Any:
    """Return the tensor as a DTensor on ``grid.device_mesh()``; differentiable.

    Raises UsageError where torch would cut it otherwise: redistribute it to such
    pieces first, which ``from_dtensor`` of torch's own shows.
    """
    grid = x.grid
    if mesh.mesh_dim_names != grid.axes:
        raise UsageError(f"to_dtensor: {mesh} is no mesh of {grid}")
    placements: list[Any] = [Replicate() for _ in grid.axes]
    for number, cut in enumerate(x.placement.dims):
        if cut is None:
            continue
        ordered = [axis for axis in grid.axes if axis in cut.axes]
        theirs = _as_torch_cuts(ordered, grid, x.shape[number])
        one, other = Placement(cut), Placement(theirs)
        if [*cut.axes] != ordered or not one.is_same_as(other, grid, [x.shape[number]]):
            raise UsageError(
                f"to_dtensor: torch would cut dimension {number} of {x} into "
                f"{theirs.sizes}: redistribute it to {theirs} first"
            )
        for axis in cut.axes:
            placements[grid.axes.index(axis)] = Shard(number)
    for axis in x.placement.partial:
        placements[grid.axes.index(axis)] = Partial("sum")
    return DTensor.from_local(
        *(x.local, mesh, placements),
        run_check=False,
        shape=x.shape,
        stride=_strides(x.shape),
    )


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a whole tensor that is contiguous."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
