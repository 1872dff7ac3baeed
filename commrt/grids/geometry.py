# SPDX-License-Identifier: Apache-2.0
"""Ranks in a Cartesian grid: who lies where, and who is next to whom.

Places are counted as in C arrays, and as MPI counts them: rank 0 is at the origin, and
the last coordinate changes fastest. A communicator over a grid (``comm.cart(...)``) has
a ``Grid`` as its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from commrt.errors import UsageError, shown
from commrt.vocabulary.checks import as_integer, as_items

__all__ = ["Coords", "Grid", "fill_dims", "make_grid", "ranks_along", "times"]

Coords = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """A Cartesian grid of places, one per rank."""

    dims: tuple[int, ...]
    """Places in each dimension."""
    periodic: tuple[bool, ...]
    """True if a dimension's last place is followed by its first."""

    @property
    def size(self) -> int:
        """Places in all."""
        return math.prod(self.dims)

    def coords_of(self, rank: int) -> Coords:
        """Return the place of ``rank``."""
        number = as_integer(rank)
        if number is None or not 0 <= number < self.size:
            raise UsageError(
                f"coords_of: rank={shown(rank)} is not a rank of the grid; expected "
                f"0..{self.size - 1}"
            )
        found = []
        for extent in reversed(self.dims):
            number, place = divmod(number, extent)
            found.append(place)
        return tuple(reversed(found))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at ``coords``; periodic dimensions wrap around."""
        places = _integers("rank_at", "coords", coords)
        if len(places) != len(self.dims):
            raise UsageError(
                f"rank_at: coords={places} has {len(places)} numbers, expected "
                f"{len(self.dims)}, one per dimension of {times(self.dims)}"
            )
        rank = self._find(places)
        if rank is None:
            raise UsageError(
                f"rank_at: coords={places} is outside {times(self.dims)}, periodic "
                f"{self.periodic}; expected numbers from 0 to below these"
            )
        return rank

    def at_offset(self, rank: int, offset: Sequence[int]) -> int | None:
        """Return the rank ``offset`` places from ``rank``; None beyond an open end."""
        here = self.coords_of(rank)
        return self._find([a + b for a, b in zip(here, offset, strict=True)])

    def shift(self, rank: int, dim: int, disp: int) -> tuple[int | None, int | None]:
        """Return the ranks ``disp`` places before and after ``rank`` in a dimension."""
        offset = [0] * len(self.dims)
        offset[dim] = disp
        before = self.at_offset(rank, [-places for places in offset])
        return before, self.at_offset(rank, offset)

    def neighbors(self, rank: int) -> tuple[int | None, ...]:
        """Return the ranks beside ``rank``: -x, +x, -y, +y, …; None at open ends."""
        pairs = [self.shift(rank, dim, 1) for dim in range(len(self.dims))]
        return tuple(beside for pair in pairs for beside in pair)

    def check_dim(self, what: str, dim: Any) -> int:
        """Return a dimension's number, from the end if negative; UsageError if none."""
        number, count = as_integer(dim), len(self.dims)
        if number is None or not -count <= number < count:
            raise UsageError(
                f"{what}: dim={shown(dim)} is not a dimension of {times(self.dims)}; "
                f"expected 0..{count - 1}"
            )
        return number % count

    def _find(self, places: Sequence[int]) -> int | None:
        rank = 0
        for place, extent, wraps in zip(places, self.dims, self.periodic, strict=True):
            if not wraps and not 0 <= place < extent:
                return None
            rank = rank * extent + place % extent
        return rank


def make_grid(size: int, dims: Any, periodic: Any) -> Grid:
    """Return the grid of ``size`` ranks that ``cart`` is asked for, or UsageError."""
    extents = fill_dims("cart", size, dims)
    if isinstance(periodic, bool):
        return Grid(extents, (periodic,) * len(extents))
    wraps = tuple(as_items(periodic) or ())
    if len(wraps) != len(extents) or not all(isinstance(one, bool) for one in wraps):
        raise UsageError(
            f"cart: periodic={shown(periodic)} must be True or False, or one of them "
            f"for each of the {len(extents)} dimensions"
        )
    return Grid(extents, wraps)


def fill_dims(what: str, size: int, dims: Any) -> tuple[int, ...]:
    """Return ``dims`` with every 0 replaced, so that they have ``size`` places.

    The chosen ones are as near to each other as can be, the largest first.
    """
    given = _integers(what, "dims", dims)
    if not given or min(given) < 0:
        raise UsageError(
            f"{what}: dims={given} must be one or more numbers from 1, or 0 where one "
            f"is to be chosen"
        )
    fixed = math.prod(extent for extent in given if extent)
    free = given.count(0)
    if not free and fixed != size:
        raise UsageError(
            f"{what}: dims={given} have {fixed} places, expected {size}, one for each "
            f"rank; put 0 where a number is to be chosen, or split() ranks off first"
        )
    if size % fixed:
        raise UsageError(
            f"{what}: dims={given} cannot be filled in for {size} ranks: expected a "
            f"divisor of {size} where {fixed} is given"
        )
    chosen: Iterator[int] = iter(_balanced(size // fixed, free, size) or ())
    return tuple(extent or next(chosen) for extent in given)


def _balanced(number: int, count: int, most: int) -> list[int] | None:
    """Return ``count`` factors of a number, up to ``most``, with the largest smallest.

    None if there are none. 1 is a factor, so with ``most=number`` there always are.
    """
    if count == 0:
        return [] if number == 1 else None
    for factor in range(1, min(number, most) + 1):
        if number % factor == 0 and factor**count >= number:
            rest = _balanced(number // factor, count - 1, factor)
            if rest is not None:
                return [factor, *rest]
    return None


def _integers(what: str, argument: str, values: Any) -> tuple[int, ...]:
    items = as_items(values)
    found = [None] if items is None else [*map(as_integer, items)]
    if any(value is None for value in found):
        raise UsageError(
            f"{what}: {argument}={shown(values)} must be a sequence of integers, such "
            "as (2, 2)"
        )
    return tuple(value for value in found if value is not None)


def times(dims: Sequence[int]) -> str:
    """Return dimensions in words, as in ``2x3``."""
    return "x".join(map(str, dims))


def ranks_along(grid: Grid, dims: Sequence[int], here: Coords) -> list[int]:
    """Return the ranks that differ from ``here`` in ``dims`` only, the last fastest."""
    places = list(here)
    ranks = []
    along = Grid(tuple(grid.dims[dim] for dim in dims), (False,) * len(dims))
    for index in range(along.size):
        for dim, place in zip(dims, along.coords_of(index), strict=True):
            places[dim] = place
        ranks.append(grid.rank_at(places))
    return ranks
