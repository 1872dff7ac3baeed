# SPDX-License-Identifier: Apache-2.0
"""Arguments of halo exchanges: checked on each rank, then compared among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from commrt.arrays.device import place_of
from commrt.boxes.strided import StridedArray, check_apart, check_writable, strided
from commrt.errors import MismatchError, UsageError, shown
from commrt.grids.geometry import Grid
from commrt.grids.halo import HaloShape
from commrt.grids.halo_order import choose_direct, needs_order
from commrt.group.agreed_calls import SharedFact, fact_number
from commrt.group.group import Group
from commrt.vocabulary.checks import as_integer, as_items, check_flag, typed
from commrt.vocabulary.dtypes import DType, ReduceOp, check_reduction
from commrt.vocabulary.reduction_names import reduce_op

__all__ = [
    "EXCHANGE",
    "HALO_CALLS",
    "REDUCE",
    "Halo",
    "HaloKind",
    "HaloKinds",
    "Least",
    "check_agreement",
    "equal_everywhere",
]

EXCHANGE, REDUCE = "halo_exchange", "halo_reduce"
HALO_CALLS = EXCHANGE, REDUCE


@dataclass(frozen=True)
class HaloKind:
    """All in which calls are alike that differ in the lengths of their arrays alone."""

    what: str
    shape: HaloShape
    reduction: ReduceOp | None
    types: tuple[tuple[DType, int], ...]
    """Element type and number of dimensions of each array."""
    on_host: bool
    least: tuple[Least, ...]
    """Cells that the arrays need in each dimension of the grid."""

    @cached_property
    def number(self) -> int:
        """A number of what is equal on all ranks, but for lengths."""
        dims = [ndim for _, ndim in self.types]
        return fact_number((self.what, equal_everywhere(self), dims))

    @cached_property
    def key(self) -> str:
        """A text that equal kinds have in common."""
        return repr((self.what, self.shape, self.reduction, self.types, self.on_host))


@dataclass(frozen=True)
class Least:
    """Cells that an array needs in a dimension of the grid."""

    dim: int
    axis: int
    """The array's dimension."""
    halo: tuple[int, int]
    """Cells of its halo, below and above."""
    block: int
    """Cells between them that its neighbours' halos are filled from."""


@dataclass(frozen=True)
class Halo:
    """The arguments of a call, checked as far as one rank can."""

    kind: HaloKind
    arrays: list[StridedArray]
    on: Any
    """The device that the arrays are on; None for host memory."""

    @property
    def what(self) -> str:
        """Name of the operation."""
        return self.kind.what

    @property
    def shape(self) -> HaloShape:
        """Widths of the halo, and how it is exchanged."""
        return self.kind.shape

    @property
    def reduction(self) -> ReduceOp | None:
        """The reduction of a sum of halos; None for an exchange."""
        return self.kind.reduction


class HaloKinds:
    """The kinds of halo calls of one rank; those that came before are at hand.

    Checking widths, axes and neighbours takes longer than the exchange itself. So it
    is done once for each kind, and a new length costs a call nothing.

    Args:
        group: the ranks.
        grid: where they lie.
    """

    _MOST = 64

    def __init__(self, group: Group, grid: Grid) -> None:
        self._group, self._grid = group, grid
        self._known: dict[Any, HaloKind] = {}
        here = grid.coords_of(group.rank)
        self._along = [
            (
                fact_number((dim, here[dim])),
                grid.size // length,
                not any(place for other, place in enumerate(here) if other != dim),
            )
            for dim, length in enumerate(grid.dims)
        ]
        """Of each dimension: a number of this rank's place, how many ranks are there,
        and whether this one is the first of them."""

    def check(
        self,
        what: str,
        fields: Any,
        width: Any,
        axes: Any,
        corners: Any,
        direct: Any,
        op: str | None,
        stream: Any,
    ) -> Halo:
        """Return a call's arguments; UsageError says what is wrong with them here."""
        here = f"{what}, rank {self._group.rank}"
        single = not isinstance(fields, list | tuple)
        given = [fields] if single else list(fields)
        if not given:
            raise UsageError(f"{here}: fields is empty: pass one array, or several")
        names = ["fields"] if single else [f"fields[{i}]" for i in range(len(given))]
        arrays = [
            strided(array, f"{here}: {name}")
            for array, name in zip(given, names, strict=True)
        ]
        on = place_of(here, arrays, stream)
        kind = self._kind(what, here, arrays, on, width, axes, corners, direct, op)
        for array in arrays:
            check_writable(array)
            for least in kind.least:
                if array.shape[least.axis] < sum(least.halo) + least.block:
                    raise _too_small(array, least)
        check_apart(arrays)
        return Halo(kind, arrays, on)

    def shared_facts(self, kind: HaloKind) -> list[SharedFact]:
        """Return the facts of ``common_facts`` with the ranks that share them."""
        axes, arrays = kind.shape.axes, range(len(kind.types))
        cells = [
            (array, axis)
            for array, (_, ndim) in enumerate(kind.types)
            for axis in range(ndim)
            if axis not in axes
        ]
        everywhere = kind.number, self._grid.size, self._group.rank == 0
        return [
            SharedFact(*everywhere, cells),
            *(
                SharedFact(*along, [(array, axis) for array in arrays])
                for axis, along in zip(axes, self._along, strict=True)
            ),
        ]

    def common_facts(self, halo: Halo) -> dict[str, Any]:
        """Return this rank's part of what ``Halos`` compares, by names.

        Blocks at the same place of a dimension must have the same extent there: of
        other places this rank knows nothing.
        """
        shape, arrays = halo.shape, halo.arrays
        facts: dict[str, Any] = {
            name: "none" if fact is None else fact
            for name, fact in equal_everywhere(halo.kind).items()
        }
        facts["cells"] = [
            [extent for axis, extent in enumerate(each.shape) if axis not in shape.axes]
            for each in arrays
        ]
        here = self._grid.coords_of(self._group.rank)
        for dim, length in enumerate(self._grid.dims):
            extents = [array.shape[shape.axes[dim]] for array in arrays]
            for place in range(length):
                is_here = place == here[dim]
                name = f"cells at place {place} of dimension {dim}"
                facts[name] = extents if is_here else None
        return facts

    def _kind(
        self,
        what: str,
        here: str,
        arrays: Sequence[StridedArray],
        on: Any,
        *options: Any,
    ) -> HaloKind:
        """Return the kind of a call, which is checked where it did not come before."""
        given = *options, *(n for a in arrays for n in (a.dtype.code, len(a.shape)))
        try:
            key = what, on is None, self._group.deterministic, typed(given)
        except TypeError:  # of a type that may be equal to what it is not
            return self._checked(what, here, arrays, on, *options)
        found = self._known.get(key)
        if found is None:
            found = self._checked(what, here, arrays, on, *options)
            if len(self._known) == self._MOST:
                self._known.clear()
            self._known[key] = found
        return found

    def _checked(
        self,
        what: str,
        here: str,
        arrays: Sequence[StridedArray],
        on: Any,
        width: Any,
        axes: Any,
        corners: Any,
        direct: Any,
        op: Any,
    ) -> HaloKind:
        grid, ndim = self._grid, len(self._grid.dims)
        reduction = _reduction(here, op, arrays)
        in_order = needs_order(self._group.deterministic, reduction, arrays)
        shape = HaloShape(
            _widths(here, width, ndim),
            _axes(arrays, axes, ndim, here),
            check_flag(here, "corners", corners),
            choose_direct(here, direct, corners, ndim, in_order),
            in_order,
        )
        least = []
        for dim, (low, high) in enumerate(shape.widths):
            before, after = grid.shift(self._group.rank, dim, 1)
            wanted = low if after is not None else 0, high if before is not None else 0
            least.append(Least(dim, shape.axes[dim], (low, high), max(wanted)))
        types = tuple((array.dtype, len(array.shape)) for array in arrays)
        return HaloKind(what, shape, reduction, types, on is None, tuple(least))


def equal_everywhere(kind: HaloKind) -> dict[str, Any]:
    """Return the arguments that are equal on all ranks, by names."""
    shape = kind.shape
    return {
        "width": shape.widths,
        "axes": shape.axes,
        "corners": shape.corners,
        "direct": shape.direct,
        "op": None if kind.reduction is None else kind.reduction.name.lower(),
        "dtypes": [dtype.name for dtype, _ in kind.types],
        "memory": "host" if kind.on_host else "device",
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


def _too_small(array: StridedArray, least: Least) -> UsageError:
    """Return the error of a block too small for its halo or a neighbour's."""
    extent, (low, high) = array.shape[least.axis], least.halo
    own = extent - low - high
    if own < 0:
        return UsageError(
            f"{array.what} has {extent} cells in dimension {least.axis}, less than its "
            f"halo of {shown(low)} + {shown(high)}; the halo is part of the array"
        )
    return UsageError(
        f"{array.what} has a block of {own} cells in dimension {least.axis}, "
        f"and a neighbour's halo is {least.block} wide: it would reach "
        f"beyond; expected a block of {least.block} cells at least, so take fewer "
        f"ranks in dimension {least.dim} of the grid, or a narrower halo"
    )


def check_agreement(
    name: str, grid: Grid, halo: Halo, said: list[dict[str, Any]]
) -> None:
    """Raise the same MismatchError on all ranks unless their arguments fit.

    ``said`` is what each rank says: ``equal_everywhere`` and its shapes.
    """
    for key in equal_everywhere(halo.kind):
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
