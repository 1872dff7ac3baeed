# SPDX-License-Identifier: Apache-2.0
"""Halo exchanges drawn by a seed, and what numpy says their results are.

The reference knows nothing of moves and messages: it looks every cell of every halo up
in the whole array, by its index there.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

DTYPES = ("float32", "float64", "int16", "int64", "uint8", "complex64", "bool")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One exchange, as all ranks know it."""

    dims: tuple[int, ...]
    periodic: tuple[bool, ...]
    widths: tuple[tuple[int, int], ...]
    cuts: tuple[tuple[int, ...], ...]
    """In each dimension of the grid, the cells of every place."""
    axes: tuple[int, ...]
    rest: tuple[int, ...]
    """Extents of the dimensions that are not distributed."""
    dtypes: tuple[str, ...]
    corners: bool
    direct: bool
    op: str | None
    seed: int

    @property
    def ndim(self) -> int:
        """Dimensions of a field."""
        return len(self.dims) + len(self.rest)

    def extents(self, coords: tuple[int, ...]) -> list[int]:
        """Return the shape of the field there, with its halo."""
        shape: list[int] = [0] * self.ndim
        for dim, axis in enumerate(self.axes):
            shape[axis] = self.cuts[dim][coords[dim]] + sum(self.widths[dim])
        others = [axis for axis in range(self.ndim) if axis not in self.axes]
        for axis, extent in zip(others, self.rest, strict=True):
            shape[axis] = extent
        return shape

    def whole(self) -> list[int]:
        """Return the shape of the whole array."""
        shape = self.extents((0,) * len(self.dims))
        for dim, axis in enumerate(self.axes):
            shape[axis] = sum(self.cuts[dim])
        return shape


def draw(rng: random.Random, size: int, most_dims: int = 5) -> Case:
    """Return a case for ``size`` ranks."""
    dims = _factors(rng, size, rng.randint(1, most_dims))
    ndim = len(dims)
    small = ndim > 3
    widths = tuple(
        (rng.choice((0, 1, 1, 2, 3)), rng.choice((0, 1, 1, 2, 3))) for _ in dims
    )
    if small:
        widths = tuple((min(a, 2), min(b, 1)) for a, b in widths)
    cuts = tuple(
        tuple(
            max(pair) + rng.randint(0 if max(pair) else 1, 2 if small else 5)
            for _ in range(n)
        )
        for n, pair in zip(dims, widths, strict=True)
    )
    rest = tuple(rng.randint(1, 3) for _ in range(rng.choice((0, 0, 1, 2))))
    rest = rest[: 5 - ndim]
    op = rng.choice((None, None, "sum", "max", "min"))
    dtypes = [rng.choice(DTYPES) for _ in range(rng.choice((1, 1, 2, 3)))]
    if op in ("max", "min"):
        dtypes = ["float32" if name == "complex64" else name for name in dtypes]
    return Case(
        dims,
        tuple(rng.random() < 0.5 for _ in dims),
        widths,
        cuts,
        tuple(rng.sample(range(ndim + len(rest)), ndim)),
        rest,
        tuple(dtypes),
        rng.random() < 0.7,
        rng.random() < 0.5,
        op,
        rng.randrange(1 << 30),
    )


def _factors(rng: random.Random, size: int, count: int) -> tuple[int, ...]:
    factors = [1] * count
    left = size
    for prime in (2, 3, 5, 7, 11):
        while left % prime == 0:
            left //= prime
            factors[rng.randrange(count)] *= prime
    assert left == 1
    return tuple(factors)


def _values(case: Case, shape: list[int], dtype: str, salt: int) -> Array:
    rng = np.random.default_rng((case.seed, salt))
    return rng.integers(0, 4, shape).astype(dtype)


def laid_out(rng: random.Random, values: Array) -> Array:
    """Return the same values in an array that may lie in any way."""
    kind = rng.randrange(4)
    if kind == 0:
        return values.copy()
    if kind == 1:
        return np.array(values, order="F")
    if kind == 2:
        wide = np.zeros([2 * n + 1 for n in values.shape], values.dtype)
        view = wide[tuple(slice(1, 2 * n + 1, 2) for n in values.shape)]
    else:
        wide = np.zeros(values.shape, values.dtype)
        view = wide[tuple(slice(None, None, -1) for _ in values.shape)]
    view[...] = values
    return view


def _indices(case: Case, coords: tuple[int, ...]) -> list[Array]:
    """Return, per dimension of the grid, the whole array's index of each cell or -1."""
    found = []
    for dim, (low, high) in enumerate(case.widths):
        total = sum(case.cuts[dim])
        own = case.cuts[dim][coords[dim]]
        first = sum(case.cuts[dim][: coords[dim]])
        index = np.arange(first - low, first + own + high)
        if case.periodic[dim]:
            index %= total
        index[(index < 0) | (index >= total)] = -1
        found.append(index)
    return found


def _regions(case: Case, coords: tuple[int, ...]) -> Iterator[tuple[Any, Any, int]]:
    """Yield parts of the field there, where they are in the whole, and in how many
    dimensions they are halo; parts beyond an open end are left out."""
    indices = _indices(case, coords)
    parts = []
    for dim, (low, _) in enumerate(case.widths):
        own = case.cuts[dim][coords[dim]]
        cells = np.arange(len(indices[dim]))
        halo = (cells < low) | (cells >= low + own)
        inside = indices[dim] >= 0
        parts.append([cells[inside & ~halo], cells[inside & halo]])
    for kinds in itertools.product((0, 1), repeat=len(parts)):
        local: list[Any] = [slice(None)] * case.ndim
        whole: list[Any] = [slice(None)] * case.ndim
        shape = case.extents(coords)
        for axis, extent in enumerate(shape):
            local[axis] = whole[axis] = np.arange(extent)
        for dim, kind in enumerate(kinds):
            local[case.axes[dim]] = parts[dim][kind]
            whole[case.axes[dim]] = indices[dim][parts[dim][kind]]
        yield np.ix_(*local), np.ix_(*whole), sum(kinds)


def expected(case: Case) -> list[list[Array]]:
    """Return every rank's fields afterwards; of a reduction, only own cells count."""
    rank_coords = [
        tuple(int(c) for c in np.unravel_index(rank, case.dims))
        for rank in range(math.prod(case.dims))
    ]
    results: list[list[Array]] = [[] for _ in rank_coords]
    for number, dtype in enumerate(case.dtypes):
        before = [start(case, rank, number) for rank in range(len(rank_coords))]
        whole = np.zeros(case.whole(), dtype)
        _gather(case, rank_coords, before, whole)
        for rank, coords in enumerate(rank_coords):
            after = before[rank].copy()
            for local, there, halos in _regions(case, coords):
                most = (99 if case.corners else 1) if case.op is None else 0
                if (case.op is not None or halos > 0) and halos <= most:
                    after[local] = whole[there]
            results[rank].append(after)
    return results


def _gather(
    case: Case, rank_coords: list[tuple[int, ...]], before: list[Array], whole: Array
) -> None:
    for rank, coords in enumerate(rank_coords):
        for local, there, halos in _regions(case, coords):
            if halos == 0:
                whole[there] = before[rank][local]
    if case.op is None:
        return
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[case.op]
    for rank, coords in enumerate(rank_coords):
        for local, there, halos in _regions(case, coords):
            if 0 < halos <= (99 if case.corners else 1):
                # A cell may be in the halo of one rank several times.
                combine.at(whole, there, before[rank][local])


def start(case: Case, rank: int, number: int) -> Array:
    """Return a rank's field before the exchange."""
    coords = tuple(int(c) for c in np.unravel_index(rank, case.dims))
    shape = case.extents(coords)
    return _values(case, shape, case.dtypes[number], 100 * number + rank)


def check(comm: Any, case: Case, results: list[list[Array]] | None = None) -> int:
    """Run a case on all ranks, twice; return how many cells were compared.

    ``results`` are what ``expected`` says, where the ranks can share it.
    """
    wanted = (expected(case) if results is None else results)[comm.rank]
    rng = random.Random(case.seed + comm.rank)
    with comm.cart(case.dims, case.periodic) as cart:
        begin = [start(case, comm.rank, i) for i in range(len(case.dtypes))]
        fields = [laid_out(rng, values) for values in begin]
        make = cart.plan.halo_exchange if case.op is None else cart.plan.halo_reduce
        more: dict[str, Any] = {} if case.op is None else {"op": case.op}
        call = make(
            fields if len(fields) > 1 else fields[0],
            case.widths,
            axes=case.axes,
            corners=case.corners,
            direct=case.direct,
            **more,
        )
        own = own_region(case, cart.coords)
        compared = 0
        for turn in range(2):
            for field, values in zip(fields, begin, strict=True):
                field[...] = values
            if turn:
                call()
            else:
                call.start().wait()
            for field, right in zip(fields, wanted, strict=True):
                region = ... if case.op is None else own
                np.testing.assert_array_equal(field[region], right[region], repr(case))
                compared += field[region].size
    return compared


def own_region(case: Case, coords: tuple[int, ...]) -> Any:
    """Return where a field has its own cells."""
    region: list[Any] = [slice(None)] * case.ndim
    for dim, (low, _) in enumerate(case.widths):
        region[case.axes[dim]] = slice(low, low + case.cuts[dim][coords[dim]])
    return tuple(region)
