# SPDX-License-Identifier: Apache-2.0
"""Halo exchange as users call it: arguments, agreement among ranks, plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commrt import _native
from commrt.arrays.device import place_of
from commrt.boxes.device_plans import BoundBoxes, DeviceBoxes
from commrt.boxes.host_plans import box_plan, compile_for
from commrt.boxes.strided import (
    StridedArray,
    address_table,
    check_apart,
    check_writable,
    strided,
)
from commrt.errors import MismatchError, UsageError
from commrt.grids.halo import HaloShape, halo_moves
from commrt.grids.halo_order import choose_direct, needs_order
from commrt.grids.neighbors import NeighborPlans
from commrt.schedule.boxes import Move
from commrt.trace.bound import follow_bound
from commrt.vocabulary.checks import as_integer, check_flag
from commrt.vocabulary.dtypes import ReduceOp, check_reduction, reduce_op

if TYPE_CHECKING:
    from commrt.comm import CartCommunicator

__all__ = [
    "EXCHANGE",
    "REDUCE",
    "CartPlans",
    "Halo",
    "agreed_halo_plan",
    "common_facts",
    "device_boxes",
    "make_halo",
    "sent_nbytes",
]

EXCHANGE, REDUCE = "halo_exchange", "halo_reduce"
_CODES = {EXCHANGE: 80, REDUCE: 81}
"""For the engine's records, apart from those of ``operations.py`` and of messages."""


class CartPlans(NeighborPlans):
    """Plans of a communicator over a grid: also of its halos, and among neighbours."""

    _comm: CartCommunicator

    def halo_exchange(
        self,
        fields: Any,
        width: Any,
        *,
        axes: Sequence[int] | None = None,
        corners: bool = True,
        direct: bool | None = None,
    ) -> _native.PersistentCall | BoundBoxes:
        """Return a call that fills the halos of ``fields`` with the neighbours' cells.

            exchange = cart.plan.halo_exchange(u, width=1)
            request = exchange.start()
            ...                        # compute where the halo is not needed
            request.wait()

        A field is this rank's block, with its halo around it. Cells beyond an open end
        of the grid are left alone. Collective: the ranks compare what they pass.

        Args:
            fields: an array of 1 to 8 dimensions with any strides, or several, which
                then move together; they may differ in type and in other dimensions.
            width: cells of the halo on each side: a number; or one per dimension of the
                grid, or a pair (low, high) of them for each.
            axes: the fields' dimension that each dimension of the grid distributes;
                without it the first of the field is the first of the grid, and so on,
                and there must be as many.
            corners: whether the cells that are outside of the block in several
                dimensions are filled, too.
            direct: corners come from the rank that owns them, in one step and up to
                3^n - 1 messages; otherwise dimension by dimension, in 2n messages,
                as it is unless something is said.

        Raises:
            UsageError: an argument is wrong here; nothing was said. In check mode it is
                raised on all ranks.
            MismatchError: the ranks do not agree; on all of them.
        """
        return self._halo(EXCHANGE, fields, width, axes, corners, direct, None)

    def halo_reduce(
        self,
        fields: Any,
        width: Any,
        *,
        op: str = "sum",
        axes: Sequence[int] | None = None,
        corners: bool = True,
        direct: bool | None = None,
    ) -> _native.PersistentCall | BoundBoxes:
        """Return a call that combines what halos hold with the cells they stand for.

        The reverse of ``halo_exchange``, with its arguments: each rank's halo goes back
        to the ranks that own these cells, which combine it with theirs by ``op``: sum,
        max, min, or another reduction but avg. Contributions are combined in the same
        order in every run; where the communicator is ``deterministic`` and the order
        matters, in one order: as ``direct``, own cells first, then what comes
        direction by direction. What the halo holds afterwards is not defined.
        """
        return self._halo(REDUCE, fields, width, axes, corners, direct, op)

    def _halo(
        self,
        what: str,
        fields: Any,
        width: Any,
        axes: Any,
        corners: Any,
        direct: Any,
        op: str | None,
    ) -> _native.PersistentCall | BoundBoxes:
        comm = self._comm

        def bind(halo: Halo) -> _native.PersistentCall | BoundBoxes:
            return _bound(comm, halo, fields)

        made: _native.PersistentCall | BoundBoxes = make_halo(
            comm, what, fields, width, axes, corners, direct, op, bind
        )
        how = {"axes": axes, "corners": corners, "direct": direct}
        if op is not None:
            how["op"] = op
        follow_bound(comm, made, what, (fields, width), **how)
        return made

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), EXCHANGE, REDUCE]


@dataclass(frozen=True)
class Halo:
    """The arguments of a call, checked as far as one rank can."""

    what: str
    arrays: list[StridedArray]
    shape: HaloShape
    reduction: ReduceOp | None
    on: Any
    """The device that the arrays are on; None for host memory."""


def make_halo(
    comm: CartCommunicator,
    what: str,
    fields: Any,
    width: Any,
    axes: Any,
    corners: Any,
    direct: Any,
    op: str | None,
    run: Callable[[Halo], Any],
    nonblocking: Any = False,
    stream: Any = None,
) -> Any:
    """Return what ``run`` makes of the arguments, checked as far as one rank can."""
    comm.check_usable()

    def check() -> Halo:
        check_flag(f"{what}, rank {comm.rank}", "nonblocking", nonblocking)
        return _checked(comm, what, fields, width, axes, corners, direct, op, stream)

    return run(comm.comparison.together(what, check))


def _checked(
    comm: CartCommunicator,
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
    here = f"{what}, rank {comm.rank}"
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
    in_order = needs_order(comm.deterministic, reduction, arrays)
    shape = HaloShape(
        _widths(here, width, len(comm.dims)),
        _axes(arrays, axes, len(comm.dims), here),
        check_flag(here, "corners", corners),
        choose_direct(here, direct, corners, len(comm.dims), in_order),
        in_order,
    )
    halo = Halo(what, arrays, shape, reduction, place_of(here, arrays, stream))
    for array in arrays:
        check_writable(array)
        _check_extents(comm, halo, array)
    check_apart(arrays)
    return halo


def sent_nbytes(
    comm: CartCommunicator,
    what: str,
    fields: Any,
    width: Any,
    *,
    axes: Any = None,
    corners: Any = True,
    direct: Any = None,
    op: str | None = None,
    **_: Any,
) -> int:
    """Return the bytes that a call with these arguments sends to other ranks."""
    if what == REDUCE and op is None:
        op = "sum"
    halo = _checked(comm, what, fields, width, axes, corners, direct, op, None)
    return sum(
        move.source.count * halo.arrays[move.source.array].dtype.itemsize
        for move in _halo_moves(comm, halo)
        if move.source is not None and move.peer is not None
    )


def _halo_moves(comm: CartCommunicator, halo: Halo) -> list[Move]:
    shapes = [array.shape for array in halo.arrays]
    return halo_moves(
        comm.grid, comm.rank, halo.shape, shapes, reverse=halo.what == REDUCE
    )


def _bound(
    comm: CartCommunicator, halo: Halo, fields: Any
) -> _native.PersistentCall | BoundBoxes:
    plan = agreed_halo_plan(comm, halo)
    if isinstance(plan, DeviceBoxes):
        return BoundBoxes(comm, plan, halo.arrays, fields, halo.what)
    table = address_table(halo.arrays)
    owners = (table, *(array.owner for array in halo.arrays))
    return _native.PersistentCall(
        comm, plan, table.ctypes.data, 0, owners, None, fields, halo.what
    )


def agreed_halo_plan(comm: CartCommunicator, halo: Halo) -> Any:
    """Return the native plan of a call that fits those of all ranks; collective."""
    _agree(comm, halo)
    if halo.on is not None:
        return device_boxes(comm, halo)
    moves = _halo_moves(comm, halo)
    layouts = [array.layout for array in halo.arrays]
    program = compile_for(
        comm,
        moves,
        [array.dtype.itemsize for array in halo.arrays],
        reduces=halo.reduction is not None,
    )
    return box_plan(
        comm,
        program,
        layouts,
        coll=_CODES[halo.what],
        label=_label(halo),
        reduction=halo.reduction,
    )


def device_boxes(comm: CartCommunicator, halo: Halo) -> DeviceBoxes:
    """Return the plan of arrays on a device, without the other ranks."""
    carries = halo.shape.corners and not halo.shape.direct
    return DeviceBoxes(
        comm,
        halo.on,
        _halo_moves(comm, halo),
        [array.layout for array in halo.arrays],
        phases=len(halo.shape.widths) if carries else 1,
        what=halo.what,
        coll=_CODES[halo.what],
        label=_label(halo),
        reduction=halo.reduction,
    )


def _label(halo: Halo) -> str:
    return "boxes/direct" if halo.shape.direct else "boxes/by_dimension"


def common_facts(comm: CartCommunicator, halo: Halo) -> dict[str, Any]:
    """Return what ``_agree`` compares, each rank's part of it, by names.

    Blocks at the same place of a dimension must have the same extent there: of other
    places this rank knows nothing.
    """
    shape, arrays = halo.shape, halo.arrays
    facts: dict[str, Any] = {
        name: "none" if fact is None else fact
        for name, fact in _equal_everywhere(halo).items()
    }
    facts["cells"] = [
        [extent for axis, extent in enumerate(array.shape) if axis not in shape.axes]
        for array in arrays
    ]
    for dim, length in enumerate(comm.dims):
        extents = [array.shape[shape.axes[dim]] for array in arrays]
        for place in range(length):
            is_here = place == comm.coords[dim]
            name = f"cells at place {place} of dimension {dim}"
            facts[name] = extents if is_here else None
    return facts


def _equal_everywhere(halo: Halo) -> dict[str, Any]:
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
                f"op={op!r}: how many ranks contribute differs from cell to cell; take "
                f"op='sum'"
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
    try:
        each: Any
        for each in given:
            number = as_integer(each)
            low, high = each if number is None else (number, number)
            pairs.append((as_integer(low), as_integer(high)))
    except (TypeError, ValueError):
        pairs = []
    found = [
        (low, high)
        for low, high in pairs
        if low is not None and high is not None and min(low, high) >= 0
    ]
    if len(found) != ndim or len(pairs) != ndim:
        raise UsageError(
            f"{what}: width={width!r} must be a number of cells from 0, or one or a "
            f"pair (low, high) of them for each of the {ndim} dimensions of the grid"
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
    try:
        numbers = [as_integer(axis) for axis in axes]
    except TypeError:
        numbers = []
    found = [axis for axis in numbers if axis is not None]
    least = min(len(array.shape) for array in arrays)
    right = len(found) == len(numbers) == ndim == len({*found})
    if not right or not all(0 <= axis < least for axis in found):
        raise UsageError(
            f"{what}: axes={axes!r} must be {ndim} different dimensions of the fields, "
            f"one for each dimension of the grid; expected numbers in 0..{least - 1}"
        )
    return tuple(found)


def _check_extents(comm: CartCommunicator, halo: Halo, array: StridedArray) -> None:
    """Raise UsageError where the block is too small for its halo or a neighbour's."""
    for dim, (low, high) in enumerate(halo.shape.widths):
        axis = halo.shape.axes[dim]
        extent = array.shape[axis]
        own = extent - low - high
        if own < 0:
            raise UsageError(
                f"{array.what} has {extent} cells in dimension {axis}, less than its "
                f"halo of {low} + {high}; the halo is part of the array"
            )
        before, after = comm.grid.shift(comm.rank, dim, 1)
        needed = max(low if after is not None else 0, high if before is not None else 0)
        if own < needed:
            raise UsageError(
                f"{array.what} has a block of {own} cells in dimension {axis}, "
                f"and a neighbour's halo is {needed} wide: it would reach "
                f"beyond; expected a block of {needed} cells at least, so take fewer "
                f"ranks in dimension {dim} of the grid, or a narrower halo"
            )


def _agree(comm: CartCommunicator, halo: Halo) -> None:
    """Raise the same MismatchError on all ranks unless their arguments fit."""
    common = _equal_everywhere(halo)
    mine = {**common, "shapes": [array.shape for array in halo.arrays]}
    said = comm.comparison.meet(halo.what, mine)
    for key in common:
        if any(each[key] != said[0][key] for each in said):
            lines = [f"  rank {rank}: {each[key]}" for rank, each in enumerate(said)]
            raise MismatchError(
                f"{halo.what} on {comm.name}: the ranks disagree on {key}; "
                f"nothing was sent:\n" + "\n".join(lines)
            )
    for index in range(len(halo.arrays)):
        _check_shapes(comm, halo, [each["shapes"][index] for each in said], index)


def _check_shapes(
    comm: CartCommunicator, halo: Halo, shapes: list[list[int]], index: int
) -> None:
    """Blocks at the same place of a dimension must have the same extent there."""
    dim_of = {axis: dim for dim, axis in enumerate(halo.shape.axes)}
    first_at: dict[tuple[int, int], int] = {}
    for rank, extents in enumerate(shapes):
        if len(extents) != len(shapes[0]):
            raise MismatchError(
                f"{halo.what} on {comm.name}: fields[{index}] has {len(extents)} "
                f"dimensions on rank {rank} and {len(shapes[0])} on rank 0; nothing "
                f"was sent"
            )
        coords = comm.grid.coords_of(rank)
        for axis, extent in enumerate(extents):
            dim = dim_of.get(axis)
            place = 0 if dim is None else coords[dim]
            other = first_at.setdefault((axis, place), rank)
            if shapes[other][axis] == extent:
                continue
            where = "" if dim is None else ", at the same place of the grid there"
            raise MismatchError(
                f"{halo.what} on {comm.name}: fields[{index}] has {extent} cells in "
                f"dimension {axis} on rank {rank}, but {shapes[other][axis]} on rank "
                f"{other}{where}; nothing was sent"
            )
