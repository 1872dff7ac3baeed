# SPDX-License-Identifier: Apache-2.0
"""Distributions of an n-dimensional array over a grid of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from commrt.errors import UsageError, shown
from commrt.vocabulary.checks import as_integer, as_items

__all__ = [
    "Block",
    "Cyclic",
    "Layout",
    "Runs",
    "common_runs",
]

_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Block:
    """One piece of the dimension per place of the grid's dimension ``dim``.

    ``dim`` may be several dimensions, which count as one, the last one fastest. Without
    ``sizes`` the pieces are as even as can be: place i of p has the elements
    ``i * n // p`` to ``(i + 1) * n // p``.
    """

    dim: int | tuple[int, ...]
    """The grid's dimension, or several."""
    sizes: tuple[int, ...] | None = None
    """Elements of each place."""

    def __post_init__(self) -> None:
        _set_dims(self)
        if self.sizes is not None:
            sizes = _integers("Block: sizes", self.sizes, 0)
            object.__setattr__(self, "sizes", sizes)

    @property
    def grid_dims(self) -> tuple[int, ...]:
        """The grid's dimensions, the last one fastest."""
        return self.dim if isinstance(self.dim, tuple) else (self.dim,)


@dataclass(frozen=True)
class Cyclic:
    """Pieces of ``block`` elements, dealt out in turn along the grid's dimension.

    ``dim`` may be several dimensions, which count as one, the last one fastest.
    """

    dim: int | tuple[int, ...]
    """The grid's dimension, or several."""
    block: int = 1
    """Elements of a piece; the last one may be shorter."""

    def __post_init__(self) -> None:
        _set_dims(self)
        _set_integer(self, "block", 1)

    @property
    def grid_dims(self) -> tuple[int, ...]:
        """The grid's dimensions, the last one fastest."""
        return self.dim if isinstance(self.dim, tuple) else (self.dim,)


def _set_dims(kind: Block | Cyclic) -> None:
    """Keep the grid's dimension, or several as a tuple, or raise UsageError."""
    if as_items(kind.dim) is None:
        _set_integer(kind, "dim", 0)
        return
    dims = _integers(f"{type(kind).__name__}: dim", kind.dim, 0)
    if not dims:
        raise UsageError(f"{type(kind).__name__}: dim=() must name a dimension")
    object.__setattr__(kind, "dim", dims[0] if len(dims) == 1 else dims)


def _set_integer(kind: Block | Cyclic, name: str, least: int) -> None:
    """Keep a field as Python's integer, or raise UsageError."""
    given = getattr(kind, name)
    number = as_integer(given)
    if number is None or not least <= number <= _LARGEST:
        raise UsageError(
            f"{type(kind).__name__}: {name}={shown(given)} must be an integer from "
            f"{least} to {_LARGEST}"
        )
    object.__setattr__(kind, name, number)


@dataclass(frozen=True)
class Runs:
    """Elements of a dimension that two ranks have in common: equal runs, evenly apart.

    Positions count in either rank's own part.
    """

    source: int
    """First element of the first run."""
    target: int
    length: int
    count: int = 1
    source_step: int = 1
    """Elements from one run to the next."""
    target_step: int = 1


class _Place(NamedTuple):
    """The elements of one place in a dimension: [low, high), or every n-th of them."""

    low: int
    high: int
    block: int = 0
    """Elements of a block, if the distribution is cyclic; else 0."""
    place: int = 0
    places: int = 1

    @property
    def period(self) -> int:
        return self.block * self.places if self.block else 1

    @property
    def num_elements(self) -> int:
        """Elements that it has."""
        if not self.block:
            return self.high - self.low
        full, rest = divmod(self.high, self.period)
        begin = self.place * self.block
        return full * self.block + min(max(rest - begin, 0), self.block)

    def pieces(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield (low, high, own position of low) of what it has within [low, high)."""
        low, high = max(low, self.low), min(high, self.high)
        if not self.block:
            if low < high:
                yield low, high, low - self.low
            return
        turn = max(0, low // self.period)
        while (begin := turn * self.period + self.place * self.block) < high:
            first, last = max(low, begin), min(high, begin + self.block)
            if first < last:
                yield first, last, turn * self.block + first - begin
            turn += 1


@dataclass(frozen=True)
class Layout:
    """Distribution of an array over a grid of ranks, dimension by dimension.

        commrt.Layout((64, 100, 8), grid=(2, 3), dims=(commrt.Block(0),
                                                       commrt.Cyclic(1, 4), None))

    Rank r lies at place r of the grid, the last dimension fastest. ``None``: every rank
    has the whole dimension. Along a dimension of the grid that distributes nothing,
    ranks have copies of the same.
    """

    shape: tuple[int, ...]
    """Shape of the whole array."""
    grid: tuple[int, ...]
    """Ranks in each dimension of the grid."""
    dims: tuple[Block | Cyclic | None, ...]
    """Distribution of each dimension of the array."""
    size: int = field(init=False, repr=False, compare=False)
    """Ranks."""
    kind: str = field(init=False, repr=False, compare=False)
    """A text that layouts have in common which differ in lengths alone."""
    numbers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """All in which a layout differs from others of its kind."""
    _local_shapes: dict[int, tuple[int, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """The shapes that ``local_shape`` has returned."""

    def __post_init__(self) -> None:
        for name in ("shape", "grid"):
            least = 0 if name == "shape" else 1
            given = _integers(f"Layout: {name}", getattr(self, name), least)
            object.__setattr__(self, name, given)
        dims = as_items(self.dims)
        if dims is None:
            raise UsageError(
                f"Layout: dims={shown(self.dims)} must be a sequence of one entry per "
                f"dimension, such as (commrt.Block(0), None)"
            )
        object.__setattr__(self, "dims", tuple(dims))
        if len(self.dims) != len(self.shape):
            raise UsageError(
                f"Layout: dims has {len(self.dims)} entries and shape={self.shape} "
                f"{len(self.shape)}; expected one for each dimension of the array"
            )
        used: set[int] = set()
        for axis, kind in enumerate(self.dims):
            if kind is None:
                continue
            self._check(axis, kind)
            for dim in kind.grid_dims:
                if dim in used:
                    raise UsageError(
                        f"Layout: dims[{axis}]={kind} uses dimension {dim} of the grid "
                        f"a second time"
                    )
                used.add(dim)
        # Calls ask for these each time.
        object.__setattr__(self, "size", math.prod(self.grid))
        blocks = [kind for kind in self.dims if isinstance(kind, Block)]
        sizes = (size for kind in blocks for size in kind.sizes or ())
        words = [str(self.grid), *map(_word, self.dims)]
        object.__setattr__(self, "kind", " ".join(words))
        object.__setattr__(self, "numbers", (*self.shape, *sizes))

    def _check(self, axis: int, kind: Any) -> None:
        if not isinstance(kind, Block | Cyclic):
            raise UsageError(
                f"Layout: dims[{axis}]={shown(kind)} must be Block, Cyclic or None"
            )
        if max(kind.grid_dims) >= len(self.grid):
            raise UsageError(
                f"Layout: dims[{axis}]={kind}: dim is not a dimension of "
                f"grid={self.grid}; expected 0..{len(self.grid) - 1}"
            )
        if isinstance(kind, Block) and kind.sizes is not None:
            sizes = kind.sizes
            places, extent = self._places_along(kind), self.shape[axis]
            if len(sizes) != places or sum(sizes) != extent:
                raise UsageError(
                    f"Layout: dims[{axis}]: sizes={sizes} do not cover dimension "
                    f"{axis} of the array: expected {places} numbers, with the sum "
                    f"{extent}"
                )

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the place of ``rank`` in the grid."""
        return _coords(self.grid, self._number("rank", rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that ``rank`` has."""
        number = rank if type(rank) is int else self._number("rank", rank)
        found = self._local_shapes.get(number)
        if found is None:
            coords = self.coords_of(number)
            axes = range(len(self.shape))
            found = tuple(self._place(axis, coords).num_elements for axis in axes)
            self._local_shapes[number] = found
        return found

    def holder(self, rank: int, of: int) -> bool:
        """Return whether ``of`` is where ``rank`` takes what ``of`` has.

        If several ranks have copies, it is ``rank`` itself, if it has one. Otherwise it
        is the rank at the same place as ``rank`` in the dimensions that make no
        difference.
        """
        used = {dim for kind in self.dims if kind is not None for dim in kind.grid_dims}
        there = self.coords_of(self._number("of", of))
        pairs = zip(self.coords_of(rank), there, strict=True)
        return all(a == b for dim, (a, b) in enumerate(pairs) if dim not in used)

    def _number(self, argument: str, rank: Any) -> int:
        """Return a rank as Python's integer, or raise UsageError."""
        number = as_integer(rank)
        if number is None or not 0 <= number < self.size:
            raise UsageError(
                f"Layout: {argument}={shown(rank)} is not a rank of grid={self.grid}; "
                f"expected 0..{shown(self.size - 1)}"
            )
        return number

    def _places_along(self, kind: Block | Cyclic) -> int:
        """Return the places along what distributes a dimension of the array."""
        return math.prod(self.grid[dim] for dim in kind.grid_dims)

    def _place(self, axis: int, coords: Sequence[int]) -> _Place:
        kind, extent = self.dims[axis], self.shape[axis]
        if kind is None:
            return _Place(0, extent)
        place, places = 0, 1
        for dim in kind.grid_dims:
            place = place * self.grid[dim] + coords[dim]
            places *= self.grid[dim]
        if places == 1:
            return _Place(0, extent)
        if isinstance(kind, Cyclic):
            return _Place(0, extent, kind.block, place, places)
        if kind.sizes is not None:
            low = sum(kind.sizes[:place])
            return _Place(low, low + kind.sizes[place])
        return _Place(extent * place // places, extent * (place + 1) // places)


@lru_cache(maxsize=1024)
def _coords(grid: tuple[int, ...], number: int) -> tuple[int, ...]:
    found = []
    for extent in reversed(grid):
        number, place = divmod(number, extent)
        found.append(place)
    return tuple(reversed(found))


def _word(kind: Block | Cyclic | None) -> str:
    """Return a distribution in short, without lengths."""
    if kind is None:
        return "whole"
    if isinstance(kind, Cyclic):
        return f"cyclic {kind.dim} {kind.block}"
    return f"{'even' if kind.sizes is None else 'uneven'} {kind.dim}"


def common_runs(
    source: Layout, source_rank: int, target: Layout, target_rank: int
) -> list[list[Runs]]:
    """Return, for each dimension, what the one has that the other shall have."""
    one, other = source.coords_of(source_rank), target.coords_of(target_rank)
    return [
        _common(source._place(axis, one), target._place(axis, other))
        for axis in range(len(source.shape))
    ]


def _common(source: _Place, target: _Place) -> list[Runs]:
    low, high = max(source.low, target.low), min(source.high, target.high)
    period = math.lcm(source.period, target.period)
    # Whole periods are all alike; before and behind them are parts of one.
    first, last = -(-low // period), high // period
    if period == 1 or last - first < 2:
        return _runs(source, target, low, high)
    found = _runs(source, target, low, first * period)
    for run in _runs(source, target, first * period, (first + 1) * period):
        steps = _own_step(source, period), _own_step(target, period)
        if steps == (run.length, run.length):  # nothing lies between the runs
            run = Runs(run.source, run.target, run.length * (last - first))
        else:
            run = Runs(run.source, run.target, run.length, last - first, *steps)
        _append(found, run)
    for run in _runs(source, target, last * period, high):
        _append(found, run)
    return found


def _own_step(place: _Place, period: int) -> int:
    return period // place.places if place.block else period


def _runs(source: _Place, target: _Place, low: int, high: int) -> list[Runs]:
    """Return the single runs within [low, high), as long as can be."""
    found: list[Runs] = []
    for begin, end, at in source.pieces(low, high):
        for first, last, there in target.pieces(begin, end):
            _append(found, Runs(at + first - begin, there, last - first))
    return found


def _append(found: list[Runs], run: Runs) -> None:
    """Append a run, or make the last one longer by it."""
    before = found[-1] if found else None
    if (
        before is not None
        and before.count == run.count == 1
        and before.source + before.length == run.source
        and before.target + before.length == run.target
    ):
        found[-1] = Runs(before.source, before.target, before.length + run.length)
    else:
        found.append(run)


def _integers(name: str, values: Any, least: int) -> tuple[int, ...]:
    items = as_items(values)
    found = [None] if items is None else [*map(as_integer, items)]
    if any(value is None or not least <= value <= _LARGEST for value in found):
        raise UsageError(
            f"{name}={shown(values)} must be a sequence of integers from {least}"
        )
    return tuple(value for value in found if value is not None)
