# SPDX-License-Identifier: Apache-2.0
"""How one parameter is cut over a grid, and how it comes together again.

A weight's *block* is what a rank computes with: its output features and its input
features. Ranks along ``z`` have the same block, and each of them stores a piece of the
block's first dimension, the *shard*. A bias is cut by output features alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_ranges
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.roles import Along, Roles
from commrt.layers.tensors.checkpoint import Pieces

__all__ = ["FeatureCut", "ParameterCut", "bias_cut", "cut_of", "weight_cut"]

Tensor: TypeAlias = torch.Tensor


class FeatureCut(NamedTuple):
    """One dimension of a parameter: its features, and the axis that cuts them."""

    features: Features
    along: Along


@dataclass(frozen=True, eq=False)
class ParameterCut:
    """A parameter of a layer on a grid.

    Args:
        grid: the ranks.
        shape: of the whole parameter.
        dims: how its first dimensions are cut; the others are whole.
        depth: the axis that cuts the block's first dimension further; None: none does.
        sums: the axes whose ranks have other parts of the gradient after a backward
            pass. ``sync_gradients`` sums along these, and along no others.
        owners: the axes along which other ranks have other parameters instead.
    """

    grid: ProcessGrid
    shape: tuple[int, ...]
    dims: tuple[FeatureCut, ...]
    depth: Along | None
    sums: tuple[str, ...] = ("data",)
    owners: tuple[str, ...] = ()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> ParameterCut:
        """Return itself: it never changes."""
        return self

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different pieces, in the grid's order."""
        used = [each.along for each in self.dims]
        if self.depth is not None:
            used.append(self.depth)
        names = {*self.owners, *(name for each in used for name in each.axes)}
        return tuple(name for name in self.grid.axes if name in names)

    @cached_property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of what this rank computes with."""
        counts = [f.count(along.place, along.size) for f, along in self.dims]
        return (*counts, *self.shape[len(counts) :])

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of the block that each place along the depth has."""
        size = 1 if self.depth is None else self.depth.size
        return tuple(b - a for a, b in even_ranges(self.block_shape[0], size))

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what this rank stores."""
        return self._places(self.grid.coords).shape

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole parameter, in memory of its own; local.

        Raises UsageError for another shape.
        """
        if tuple(whole.shape) != self.shape:
            raise UsageError(
                f"a parameter of shape {tuple(whole.shape)} cannot be cut as one of "
                f"shape {self.shape}"
            )
        at = self._places(self.grid.coords)
        if whole.is_meta:
            return whole.new_empty(at.shape)
        part = whole.detach()
        for dim, index in enumerate(at.indices):
            part = part.index_select(dim, index.to(whole.device))
        return part.clone(memory_format=torch.contiguous_format)

    def whole(self, shard: Tensor, *, on_first_only: bool = False) -> Tensor | None:
        """Return the whole parameter; collective over the axes that cut it.

        Args:
            shard: this rank's.
            on_first_only: True: only the first rank along these axes gets it, and the
                others get None.

        Bytes: an ``allgatherv`` of the parameter, or a ``gatherv``.
        """
        if not self.axes or self.owners:
            return shard.detach().clone()
        comm = self.grid[self.axes]
        ranges = [range(self.grid.size(axis)) for axis in self.axes]
        places = [
            self._places(dict(zip(self.axes, coords, strict=True)))
            for coords in itertools.product(*ranges)
        ]
        counts = [math.prod(each.shape) for each in places]
        flat = shard.detach().contiguous().view(-1)
        if on_first_only:
            out = flat.new_empty(sum(counts)) if comm.rank == 0 else None
            comm.gatherv(flat, counts=counts, out=out, root=0)
            if out is None:
                return None
        else:
            out = flat.new_empty(sum(counts))
            comm.allgatherv(flat, counts=counts, out=out)
        whole = out.new_empty(self.shape)
        for each, part in zip(places, out.split(counts), strict=True):
            rows, *columns = (index.to(whole.device) for index in each.indices)
            if columns:
                whole[rows[:, None], columns[0]] = part.view(each.shape)
            else:
                whole[rows] = part.view(each.shape)
        return whole

    @cached_property
    def pieces(self) -> Pieces:
        """Where this rank's shard lies in the whole, for checkpoints."""
        runs = []
        for index in self._places(self.grid.coords).indices:
            found: list[tuple[int, int, int]] = []
            for at, number in enumerate(index.tolist()):
                if found and number == found[-1][1]:
                    found[-1] = found[-1][0], number + 1, found[-1][2]
                else:
                    found.append((number, number + 1, at))
            runs.append(tuple(found))
        whole = self.shape[len(runs) :]
        runs += [((0, extent, 0),) if extent else () for extent in whole]
        return Pieces(self.shape, tuple(runs))

    def is_as(self, other: ParameterCut) -> bool:
        """Return whether a parameter is cut here as it is there."""
        mine = [(each.features, each.along.name) for each in self.dims]
        theirs = [(each.features, each.along.name) for each in other.dims]
        return self.grid is other.grid and self.shape == other.shape and mine == theirs

    def _places(self, coords: Mapping[str, int]) -> _Places:
        """Return where the shard of a place on the grid lies in the whole."""
        indices = [
            features.indices(along.place_at(coords), along.size)
            for features, along in self.dims
        ]
        if self.depth is not None:
            place = self.depth.place_at(coords)
            low, high = even_ranges(len(indices[0]), self.depth.size)[place]
            indices[0] = indices[0][low:high]
        shape = (*map(len, indices), *self.shape[len(indices) :])
        return _Places(tuple(indices), shape)


class _Places(NamedTuple):
    """Where a shard lies: its numbers in each cut dimension, and its shape."""

    indices: tuple[Tensor, ...]
    shape: tuple[int, ...]


def weight_cut(
    roles: Roles, shape: tuple[int, ...], outputs: Features, inputs: Features
) -> ParameterCut:
    """Return how a weight is cut whose first dimensions are outputs and inputs."""
    dims = FeatureCut(outputs, roles.outputs), FeatureCut(inputs, roles.inputs)
    return ParameterCut(roles.grid, shape, dims, roles.depth)


def bias_cut(roles: Roles, outputs: Features) -> ParameterCut:
    """Return how a bias is cut: by outputs alone."""
    dims = (FeatureCut(outputs, roles.outputs),)
    return ParameterCut(roles.grid, (outputs.size,), dims, None)


def cut_of(parameter: Tensor) -> ParameterCut | None:
    """Return how a layer has cut a parameter; None of a parameter that is whole."""
    found: ParameterCut | None = getattr(parameter, "grid_cut", None)
    return found
