# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a tensor lie on a grid of processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from commrt.boxes.layouts import Block, Cyclic, Layout
from commrt.errors import UsageError, shown, suggest
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_sizes
from commrt.vocabulary.checks import as_integer, as_items

__all__ = ["Placement", "Sharded"]


@dataclass(frozen=True)
class Sharded:
    """How one dimension of a tensor is cut along one axis of a grid, or several.

        Sharded("height")                  # pieces as even as can be
        Sharded("height", sizes=(120, 93))
        Sharded("row", block=64)           # blocks of 64, dealt out in turn
        Sharded(("data", "row"))           # along both, the last one fastest

    Even pieces: place i of p has the elements ``i * n // p`` to ``(i + 1) * n // p``.
    """

    axes: tuple[str, ...]
    """Axes of the grid; one may be given as a text."""
    sizes: tuple[int, ...] | None = None
    """Elements of each place; None: as even as can be."""
    block: int | None = None
    """Elements of a block that is dealt out in turn; None: one piece for each place."""

    def __post_init__(self) -> None:
        axes = as_items(self.axes) if not isinstance(self.axes, str) else [self.axes]
        if not axes or not all(isinstance(axis, str) for axis in axes):
            raise UsageError(
                f"Sharded: axes={shown(self.axes)} must be the name of an axis, or "
                f"several, such as 'height' or ('data', 'row')"
            )
        object.__setattr__(self, "axes", tuple(axes))
        if self.sizes is not None:
            sizes = [as_integer(size) for size in as_items(self.sizes) or [None]]
            if any(size is None or size < 0 for size in sizes):
                raise UsageError(
                    f"Sharded: sizes={shown(self.sizes)} must be numbers of elements, "
                    f"one for each place"
                )
            object.__setattr__(self, "sizes", tuple(sizes))
        if self.block is not None:
            block = as_integer(self.block)
            if block is None or block < 1 or self.sizes is not None:
                raise UsageError(
                    f"Sharded: block={shown(self.block)} must be a number of elements "
                    f"from 1, without sizes beside it"
                )
            object.__setattr__(self, "block", block)

    def pieces(self, extent: int, places: int) -> tuple[int, ...]:
        """Return the elements of each place; only without a ``block``."""
        return even_sizes(extent, places) if self.sizes is None else self.sizes

    def __repr__(self) -> str:
        axes = repr(self.axes[0] if len(self.axes) == 1 else self.axes)
        if self.sizes is not None:
            return f"Sharded({axes}, sizes={self.sizes})"
        return axes if self.block is None else f"Sharded({axes}, block={self.block})"


def _sharded(given: Any) -> Sharded | None:
    """Return a dimension's entry as it is kept."""
    if given is None or isinstance(given, Sharded):
        return given
    return Sharded(given)


@dataclass(frozen=True, init=False)
class Placement:
    """Where a tensor's elements lie, dimension by dimension.

        Placement("data", None, "height", ("width", "depth"))
        Placement(None, "row", partial="depth")   # sums that are still to be made

    Each dimension has the axis that cuts it, several axes, a ``Sharded``, or None where
    every rank has all of it. Along an axis that cuts nothing, ranks have copies; along
    a *partial* one the tensor is the sum of what they have.

    Args:
        dims: one entry for each dimension of the tensor.
        partial: axes along which the tensor is the sum of what ranks have: a name, or
            several.
    """

    dims: tuple[Sharded | None, ...]
    partial: tuple[str, ...]

    def __init__(
        self,
        *dims: str | Sequence[str] | Sharded | None,
        partial: str | Iterable[str] = (),
    ) -> None:
        named = [partial] if isinstance(partial, str) else as_items(partial)
        if named is None or not all(isinstance(axis, str) for axis in named):
            raise UsageError(
                f"Placement: partial={shown(partial)} must be the name of an axis, or "
                f"several, such as 'row' or ('row', 'depth')"
            )
        object.__setattr__(self, "dims", tuple(map(_sharded, dims)))
        object.__setattr__(self, "partial", tuple(sorted(named)))
        used = [axis for dim in self.dims if dim for axis in dim.axes] + [*named]
        for axis in used:
            if used.count(axis) > 1:
                raise UsageError(
                    f"Placement: {self} uses the axis {axis!r} more than once; "
                    f"expected once at most"
                )

    @classmethod
    def replicated(cls, num_dims: int) -> Placement:
        """Return the placement of a tensor that all ranks have whole."""
        return cls(*[None] * num_dims)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes that cut a dimension."""
        return tuple(axis for dim in self.dims if dim for axis in dim.axes)

    def without_partial(self) -> Placement:
        """Return the same cuts of a tensor whose sums are made."""
        return Placement(*self.dims) if self.partial else self

    def with_dims(self, dims: Sequence[Sharded | None]) -> Placement:
        """Return the same with other cuts."""
        return Placement(*dims, partial=self.partial)

    def with_partial(self, partial: Iterable[str]) -> Placement:
        """Return the same with other partial axes."""
        return Placement(*self.dims, partial=partial)

    def check(self, what: str, grid: ProcessGrid, shape: Sequence[int]) -> None:
        """Raise UsageError unless a tensor of ``shape`` can lie so on ``grid``."""
        for axis in (*self.cut_axes, *self.partial):
            if axis not in grid.axes:
                raise UsageError(
                    f"{what}: {self}: no axis {axis!r} in {grid}"
                    f"{suggest(axis, grid.axes)}"
                )
        if len(self.dims) != len(shape):
            raise UsageError(
                f"{what}: {self} has {len(self.dims)} dimensions, and the tensor "
                f"{len(shape)}: {tuple(shape)}"
            )
        for number, dim in enumerate(self.dims):
            if dim is None or dim.sizes is None:
                continue
            places = grid.size(dim.axes)
            if len(dim.sizes) != places or sum(dim.sizes) != shape[number]:
                raise UsageError(
                    f"{what}: {self}: sizes={dim.sizes} do not cover dimension "
                    f"{number}: expected {places} numbers, with the sum "
                    f"{shape[number]}"
                )

    def layout(self, grid: ProcessGrid, shape: Sequence[int]) -> Layout:
        """Return the layout over the ranks of the grid; partial axes hold copies."""
        names = grid.axes
        kinds: list[Block | Cyclic | None] = []
        for dim in self.dims:
            if dim is None:
                kinds.append(None)
                continue
            at = tuple(names.index(axis) for axis in dim.axes)
            if dim.block is not None:
                kinds.append(Cyclic(at, dim.block))
            else:
                kinds.append(Block(at, dim.sizes))
        return Layout(tuple(shape), tuple(grid.shape.values()), tuple(kinds))

    def local_shape(self, grid: ProcessGrid, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return tuple(
            n
            if cut is None
            else sum(high - low for low, high, _ in self.runs(at, grid, n))
            for at, (cut, n) in enumerate(zip(self.dims, shape, strict=True))
        )

    def runs(
        self, number: int, grid: ProcessGrid, extent: int
    ) -> list[tuple[int, int, int]]:
        """Return the runs of elements that this rank has of a dimension.

        Each is (low, high, position of low in this rank's part); none is empty.
        """
        cut = self.dims[number]
        if cut is None:
            return [(0, extent, 0)] if extent else []
        places, place = grid.size(cut.axes), grid.place(cut.axes)
        if cut.block is not None:
            starts = range(place * cut.block, extent, places * cut.block)
            return [
                (low, min(low + cut.block, extent), turn * cut.block)
                for turn, low in enumerate(starts)
            ]
        sizes = cut.pieces(extent, places)
        low = sum(sizes[:place])
        return [(low, low + sizes[place], 0)] if sizes[place] else []

    def is_same_as(
        self, other: Placement, grid: ProcessGrid, shape: Sequence[int]
    ) -> bool:
        """Return whether every rank has the same elements, however that is written."""
        if self == other:
            return True
        if _several(self.partial, grid) != _several(other.partial, grid):
            return False
        pairs = zip(self.dims, other.dims, shape, strict=True)
        return all(_means(a, grid, n) == _means(b, grid, n) for a, b, n in pairs)

    def __repr__(self) -> str:
        entries = [repr(dim) for dim in self.dims]
        if self.partial:
            said = self.partial[0] if len(self.partial) == 1 else self.partial
            entries.append(f"partial={said!r}")
        return f"Placement({', '.join(entries)})"


def _several(axes: tuple[str, ...], grid: ProcessGrid) -> tuple[str, ...]:
    """Return the axes with several ranks."""
    return tuple(axis for axis in axes if grid.size(axis) > 1)


def _means(dim: Sharded | None, grid: ProcessGrid, extent: int) -> Any:
    """Return what a cut says, the same for all ways to write it."""
    axes = () if dim is None else _several(dim.axes, grid)
    if dim is None or not axes:
        return None
    places = math.prod(grid.size(axis) for axis in axes)
    if dim.block is not None:
        one_each = dim.block * places >= extent
        if not one_each:
            return axes, dim.block
        ends = [min(dim.block * place, extent) for place in range(places + 1)]
    else:
        return axes, dim.pieces(extent, places)
    return axes, tuple(b - a for a, b in pairwise(ends))
