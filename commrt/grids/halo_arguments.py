# SPDX-License-Identifier: Apache-2.0
"""Arguments of halo exchanges: checked on each rank, then compared among the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from commrt.arrays.device import place_of
from commrt.boxes.strided import StridedArray, check_apart, check_writable, strided
from commrt.errors import MismatchError, UsageError, shown
from commrt.grids.geometry import Grid
from commrt.grids.halo import HaloShape
from commrt.grids.halo_order import choose_direct, needs_order
from commrt.group.agreed_calls import SharedFact
from commrt.group.group import Group
from commrt.vocabulary.checks import as_integer, as_items, check_flag
from commrt.vocabulary.dtypes import ReduceOp, check_reduction
from commrt.vocabulary.reduction_names import reduce_op

__all__ = [
    "EXCHANGE",
    "HALO_CALLS",
    "REDUCE",
    "Halo",
    "check_agreement",
    "check_halo",
    "common_facts",
    "equal_everywhere",
    "shared_facts",
]

EXCHANGE, REDUCE = "halo_exchange", "halo_reduce"
HALO_CALLS = EXCHANGE, REDUCE


@dataclass(frozen=True)
class Halo:
    """The arguments of a call, checked as far as one rank can."""

    what: str
    arrays: list[StridedArray]
    shape: HaloShape
    reduction: ReduceOp | None
    on: Any
    """The device that the arrays are on; None for host memory."""


def check_halo(
    group: Group,
    grid: Grid,
    what: str,
    fields: Any,
    width: Any,
    axes: Any,
    corners: Any,
    direct: Any,
    op: str | None,
    stream: Any,
) -> Halo:
    """Return the arguments; UsageError says what is wrong with them on this rank."""
    here = f"{what}, rank {group.rank}"
    single = not isinstance(fields, list | tuple)
    given = [fields] if single else list(fields)
    if not given:
        raise UsageError(f"{here}: fields is empty: pass one array, or several")
    names = ["fields"] if single else [f"fields[{i}]" for i in range(len(given))]
    arrays = [
        strided(array, f"{here}: {name}")
        for array, name in zip(given, names, strict=True)
    ]
    reduction = _reduction(here, op, arrays)
    in_order = needs_order(group.deterministic, reduction, arrays)
    shape = HaloShape(
        _widths(here, width, len(grid.dims)),
        _axes(arrays, axes, len(grid.dims), here),
        check_flag(here, "corners", corners),
        choose_direct(here, direct, corners, len(grid.dims), in_order),
        in_order,
    )
    halo = Halo(what, arrays, shape, reduction, place_of(here, arrays, stream))
    for array in arrays:
        check_writable(array)
        _check_extents(group.rank, grid, halo, array)
    check_apart(arrays)
    return halo


def common_facts(grid: Grid, rank: int, halo: Halo) -> dict[str, Any]:
    """Return this rank's part of what ``Halos`` compares, by names.

    Blocks at the same place of a dimension must have the same extent there: of other
    places this rank knows nothing.
    """
    shape, arrays = halo.shape, halo.arrays
    facts: dict[str, Any] = {
        name: "none" if fact is None else fact
        for name, fact in equal_everywhere(halo).items()
    }
    facts["cells"] = [
        [extent for axis, extent in enumerate(array.shape) if axis not in shape.axes]
        for array in arrays
    ]
    here = grid.coords_of(rank)
    for dim, length in enumerate(grid.dims):
        extents = [array.shape[shape.axes[dim]] for array in arrays]
        for place in range(length):
            is_here = place == here[dim]
            name = f"cells at place {place} of dimension {dim}"
            facts[name] = extents if is_here else None
    return facts


def shared_facts(grid: Grid, rank: int, halo: Halo) -> Iterator[SharedFact]:
    """Yield the facts of ``common_facts`` with the ranks that share them."""
    shape, arrays = halo.shape, halo.arrays
    size = math.prod(grid.dims)
    cells = [
        [extent for axis, extent in enumerate(array.shape) if axis not in shape.axes]
        for array in arrays
    ]
    yield SharedFact((halo.what, equal_everywhere(halo), cells), size, rank == 0)
    here = grid.coords_of(rank)
    for dim, length in enumerate(grid.dims):
        extents = [array.shape[shape.axes[dim]] for array in arrays]
        is_first = not any(place for other, place in enumerate(here) if other != dim)
        yield SharedFact((dim, here[dim], extents), size // length, is_first)


def equal_everywhere(halo: Halo) -> dict[str, Any]:
    """Return the arguments that are equal on all ranks, by names."""
    shape = halo.shape
    return {
        "width": shape.widths,
        "axes": shape.axes,
        "corners": shape.corners,
        "direct": shape.direct,
        "op": None if halo.reduction is None else halo.reduction.name.lower(),
        "dtypes": [array.dtype.name for array in halo.arrays],
        "memory": "host" if halo.on is None else "device",
    }


def _reduction(
    what: str, op: str | None, arrays: Sequence[StridedArray]
) -> ReduceOp | None:
    if op is None:
        return None
    try:
        found = reduce_op(op)
        if found in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            raise UsageError(
                f"op={shown(op)}: how many ranks contribute differs from cell to cell; "
                "take op='sum'"
            )
        for array in arrays:
            check_reduction(found, array.dtype)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    return found


def _widths(what: str, width: Any, ndim: int) -> tuple[tuple[int, int], ...]:
    """Return the pair of each dimension of the grid."""
    one = as_integer(width)
    given: Any = [one] * ndim if one is not None else width
    pairs = []
    for each in as_items(given) or ():
        number = as_integer(each)
        pair = as_items(each) if number is None else [number, number]
        low, high = pair if pair is not None and len(pair) == 2 else (None, None)
        pairs.append((as_integer(low), as_integer(high)))
    found = [
        (low, high)
        for low, high in pairs
        if low is not None and high is not None and min(low, high) >= 0
    ]
    if len(found) != ndim or len(pairs) != ndim:
        raise UsageError(
            f"{what}: width={shown(width)} must be a number of cells from 0, or one or "
            f"a pair (low, high) of them for each of the {ndim} dimensions of the grid"
        )
    return tuple(found)


def _axes(
    arrays: Sequence[StridedArray], axes: Any, ndim: int, what: str
) -> tuple[int, ...]:
    """Return the dimension of the arrays for each dimension of the grid."""
    if axes is None:
        for array in arrays:
            if len(array.shape) != ndim:
                raise UsageError(
                    f"{array.what} has {len(array.shape)} dimensions and the grid "
                    f"{ndim}: say by axes= which of them the grid distributes"
                )
        return tuple(range(ndim))
    numbers = [*map(as_integer, as_items(axes) or ())]
    found = [axis for axis in numbers if axis is not None]
    least = min(len(array.shape) for array in arrays)
    right = len(found) == len(numbers) == ndim == len({*found})
    if not right or not all(0 <= axis < least for axis in found):
        raise UsageError(
            f"{what}: axes={shown(axes)} must be {ndim} different dimensions of the "
            "fields, one for each dimension of the grid; expected numbers in "
            f"0..{least - 1}"
        )
    return tuple(found)


def _check_extents(rank: int, grid: Grid, halo: Halo, array: StridedArray) -> None:
    """Raise UsageError where the block is too small for its halo or a neighbour's."""
    for dim, (low, high) in enumerate(halo.shape.widths):
        axis = halo.shape.axes[dim]
        extent = array.shape[axis]
        own = extent - low - high
        if own < 0:
            raise UsageError(
                f"{array.what} has {extent} cells in dimension {axis}, less than its "
                f"halo of {shown(low)} + {shown(high)}; the halo is part of the array"
            )
        before, after = grid.shift(rank, dim, 1)
        needed = max(low if after is not None else 0, high if before is not None else 0)
        if own < needed:
            raise UsageError(
                f"{array.what} has a block of {own} cells in dimension {axis}, "
                f"and a neighbour's halo is {needed} wide: it would reach "
                f"beyond; expected a block of {needed} cells at least, so take fewer "
                f"ranks in dimension {dim} of the grid, or a narrower halo"
            )


def check_agreement(
    name: str, grid: Grid, halo: Halo, said: list[dict[str, Any]]
) -> None:
    """Raise the same MismatchError on all ranks unless their arguments fit.

    ``said`` is what each rank says: ``equal_everywhere`` and its shapes.
    """
    for key in equal_everywhere(halo):
        if any(each[key] != said[0][key] for each in said):
            lines = [f"  rank {rank}: {each[key]}" for rank, each in enumerate(said)]
            raise MismatchError(
                f"{halo.what} on {name}: the ranks disagree on {key}; "
                f"nothing was sent; pass equal arguments on all ranks:\n"
                + "\n".join(lines)
            )
    for index in range(len(halo.arrays)):
        _check_shapes(name, grid, halo, [each["shapes"][index] for each in said], index)


def _check_shapes(
    name: str, grid: Grid, halo: Halo, shapes: list[list[int]], index: int
) -> None:
    """Blocks at the same place of a dimension must have the same extent there."""
    dim_of = {axis: dim for dim, axis in enumerate(halo.shape.axes)}
    first_at: dict[tuple[int, int], int] = {}
    for rank, extents in enumerate(shapes):
        if len(extents) != len(shapes[0]):
            raise MismatchError(
                f"{halo.what} on {name}: fields[{index}] has {len(extents)} "
                f"dimensions on rank {rank} and {len(shapes[0])} on rank 0; nothing "
                f"was sent; pass fields of equally many dimensions on all ranks"
            )
        coords = grid.coords_of(rank)
        for axis, extent in enumerate(extents):
            dim = dim_of.get(axis)
            place = 0 if dim is None else coords[dim]
            other = first_at.setdefault((axis, place), rank)
            if shapes[other][axis] == extent:
                continue
            where = "" if dim is None else ", at the same place of the grid there"
            raise MismatchError(
                f"{halo.what} on {name}: fields[{index}] has {extent} cells in "
                f"dimension {axis} on rank {rank}, but {shapes[other][axis]} on rank "
                f"{other}{where}; nothing was sent; the two must be equal"
            )
