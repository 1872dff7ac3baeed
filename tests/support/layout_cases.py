# SPDX-License-Identifier: Apache-2.0
"""Layouts drawn by a seed, and which elements numpy says a rank has."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from halo_cases import DTYPES, laid_out

from commrt import Block, Cyclic, Layout

Array = np.ndarray[Any, Any]


def draw_shape(rng: random.Random) -> tuple[int, ...]:
    ndim = rng.randint(1, 5)
    most = {1: 60, 2: 25, 3: 12, 4: 6, 5: 4}[ndim]
    return tuple(
        rng.randint(0 if rng.random() < 0.05 else 1, most) for _ in range(ndim)
    )


def draw_layout(rng: random.Random, shape: tuple[int, ...], size: int) -> Layout:
    """Return any layout of an array over ``size`` ranks."""
    grid = [1] * rng.randint(1, 3)
    left, prime = size, 2
    while left > 1:
        while left % prime == 0:
            left //= prime
            grid[rng.randrange(len(grid))] *= prime
        prime += 1
    free = list(range(len(grid)))
    rng.shuffle(free)
    dims: list[Any] = []
    for extent in shape:
        kind = rng.choice(("block", "sizes", "cyclic", "cyclic", "all"))
        if kind == "all" or not free:
            dims.append(None)
            continue
        dim: Any = free.pop()
        if free and rng.random() < 0.3:
            dim = (dim, *(free.pop() for _ in range(rng.randint(1, len(free)))))
        if kind == "cyclic":
            dims.append(Cyclic(dim, rng.choice((1, 1, 2, 3, 7))))
        elif kind == "block":
            dims.append(Block(dim))
        else:
            dims.append(Block(dim, draw_sizes(rng, extent, places_along(grid, dim))))
    return Layout(shape, tuple(grid), tuple(dims))


def draw_lengths(rng: random.Random, layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout of an array of another shape, of the same kind."""
    dims: list[Any] = []
    for extent, kind in zip(shape, layout.dims, strict=True):
        if isinstance(kind, Block) and kind.sizes is not None:
            places = places_along(layout.grid, kind.dim)
            kind = Block(kind.dim, draw_sizes(rng, extent, places))
        dims.append(kind)
    return Layout(shape, layout.grid, tuple(dims))


def places_along(grid: Sequence[int], dim: int | tuple[int, ...]) -> int:
    """Return the places along one dimension of the grid, or several."""
    return math.prod(grid[one] for one in (dim if isinstance(dim, tuple) else (dim,)))


def draw_sizes(rng: random.Random, extent: int, places: int) -> tuple[int, ...]:
    """Return elements of so many pieces of a dimension."""
    cuts = sorted(rng.randint(0, extent) for _ in range(places - 1))
    return tuple(b - a for a, b in pairwise([0, *cuts, extent]))


def indices(layout: Layout, rank: int) -> list[Array]:
    """Return, per dimension of the array, the indices that a rank has."""
    coords = np.unravel_index(rank, layout.grid)
    found = []
    for extent, kind in zip(layout.shape, layout.dims, strict=True):
        index = np.arange(extent)
        if kind is not None:
            dims = list(kind.grid_dims)
            extents = [layout.grid[dim] for dim in dims]
            at = [coords[dim] for dim in dims]
            place, places = int(np.ravel_multi_index(at, extents)), math.prod(extents)
            if isinstance(kind, Cyclic):
                index = index[index // kind.block % places == place]
            elif kind.sizes is not None:
                index = np.split(index, np.cumsum(kind.sizes)[:-1])[place]
            else:
                index = index[extent * place // places : extent * (place + 1) // places]
        found.append(index)
    return found


def part(whole: Array, layout: Layout, rank: int) -> Array:
    """Return what a rank has of the whole array."""
    return whole[np.ix_(*indices(layout, rank))]


def move_drawn(comm: Any, rng: random.Random) -> int:
    """Move a drawn array between drawn layouts, twice; return the elements compared.

    Every rank draws the same; how arrays lie is drawn by each for itself.
    """
    shape = draw_shape(rng)
    source, target = (draw_layout(rng, shape, comm.size) for _ in range(2))
    dtype = rng.choice(DTYPES)
    seed = rng.randrange(1 << 30)
    own = random.Random(seed + comm.rank)
    compared = 0
    x = np.empty(source.local_shape(comm.rank), dtype)
    x = laid_out(own, x)
    out = laid_out(own, np.zeros(target.local_shape(comm.rank), dtype))
    given = out if own.random() < 0.7 else None
    call = comm.plan.redistribute(x, source, target, out=given)
    for turn in range(2):
        whole = np.random.default_rng(seed + turn).integers(0, 99, shape).astype(dtype)
        x[...] = part(whole, source, comm.rank)
        got = call() if turn else call.start().wait()
        assert given is None or got is given
        right = part(whole, target, comm.rank)
        np.testing.assert_array_equal(got, right, f"{source} {target} {dtype}")
        np.testing.assert_array_equal(x, part(whole, source, comm.rank))
        compared += right.size
    return compared
