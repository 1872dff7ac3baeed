# SPDX-License-Identifier: Apache-2.0
"""Halo exchange of a communicator over a grid, with and without a plan at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from commrt import _native
from commrt.arrays.places import places_of
from commrt.boxes.compared import ComparedBoxes
from commrt.boxes.device_plans import BoundBoxes, DeviceBoxes
from commrt.boxes.finite_boxes import check_finite_boxes
from commrt.boxes.fronts import Fronts, box_front
from commrt.boxes.host_plans import Place, box_template
from commrt.boxes.strided import address_table
from commrt.calls.bound_call import Binders
from commrt.calls.families import Families
from commrt.device_calls.collectives import DeviceCollectives
from commrt.grids.geometry import Grid
from commrt.grids.halo import HaloShape, halo_moves
from commrt.grids.halo_arguments import (
    EXCHANGE,
    HALO_CALLS,
    REDUCE,
    Halo,
    HaloKinds,
    check_agreement,
    equal_everywhere,
)
from commrt.group.compare import Comparison
from commrt.group.group import Group
from commrt.planning.facts import number_of_facts
from commrt.schedule.boxes import Move
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.operations import other_call

__all__ = ["Halos"]


_Given = tuple[Any, Any, Any, Any, Any, Any]
"""fields, width, axes, corners, direct and op, as the caller passed them."""


class Halos:
    """Exchanges halos among the ranks of a grid.

    Args:
        group: the ranks.
        grid: where they lie.
        devices: moves boxes of arrays on devices.
        comparison: compares the arguments of all ranks.
        plans: keeps plans for calls that have none at hand.
        families: keeps what host calls have in common that differ in shapes.
    """

    def __init__(
        self,
        group: Group,
        grid: Grid,
        devices: DeviceCollectives,
        comparison: Comparison,
        plans: ComparedBoxes,
        families: Families,
    ) -> None:
        self._group, self._grid, self._devices = group, grid, devices
        self._kinds = HaloKinds(group, grid)
        self._fronts = Fronts()
        self._comparison, self._plans = comparison, plans
        self._families = families

    def halo_exchange(
        self,
        fields: Any,
        width: Any,
        *,
        axes: Sequence[int] | None = None,
        corners: bool = True,
        direct: bool | None = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Fill the halos of ``fields`` with the neighbours' cells; return ``fields``.

        As ``plan.halo_exchange``, with its arguments. Calls whose arrays are laid out
        like those of an earlier call use its plan. With host arrays the ranks find out
        by a reduction of 8 bytes whether their arguments fit, and a nonblocking call
        waits for it, too. With arrays on devices they compare them on the way.
        """
        how = nonblocking, timeout_s, stream
        return self._halo(EXCHANGE, None, fields, width, axes, corners, direct, *how)

    def halo_reduce(
        self,
        fields: Any,
        width: Any,
        *,
        op: str = "sum",
        axes: Sequence[int] | None = None,
        corners: bool = True,
        direct: bool | None = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Combine what halos hold with the cells they stand for; return ``fields``.

        As ``plan.halo_reduce``, with its arguments; plans are kept as those of
        ``halo_exchange``.
        """
        how = nonblocking, timeout_s, stream
        return self._halo(REDUCE, op, fields, width, axes, corners, direct, *how)

    @property
    def binders(self) -> Binders:
        """Binders of the operations on halos, by name."""
        return {name: partial(self._bound, name) for name in HALO_CALLS}

    def _bound(
        self,
        what: str,
        fields: Any,
        width: Any,
        *,
        axes: Any,
        corners: Any,
        direct: Any,
        op: str | None = None,
    ) -> _native.PersistentCall | BoundBoxes:
        """Return the persistent call; see ``CartPlans``. Collective."""
        halo = self._checked(what, (fields, width, axes, corners, direct, op))
        plan = self._agreed_plan(halo)
        group = self._group
        if halo.on is not None:
            look = partial(self._check_values, halo)
            return BoundBoxes(group, plan, halo.arrays, fields, halo.what, look)
        table, address = address_table(halo.arrays)
        owners = (table, *(array.owner for array in halo.arrays))
        return _native.PersistentCall(
            *(group, plan, address, 0, owners, None, fields, halo.what),
            places_of(array.array for array in halo.arrays),
            look=partial(self._check_values, halo),
        )

    def sent_nbytes(
        self,
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
        given = fields, width, axes, corners, direct, op
        halo = self._kinds.check(what, *given, None)
        return sum(
            move.source.count * halo.arrays[move.source.array].dtype.itemsize
            for move in self._moves(halo, halo.shape)
            if move.source is not None and move.peer is not None
        )

    def _checked(
        self,
        what: str,
        given: _Given,
        nonblocking: Any = False,
        stream: Any = None,
        *,
        runs: bool = False,
    ) -> Halo:
        """Return the arguments of a call, checked as far as one rank can.

        ``runs``: with the values, since the call runs now.
        """
        group = self._group
        group.check_usable()

        def check() -> Halo:
            check_flag(f"{what}, rank {group.rank}", "nonblocking", nonblocking)
            halo = self._kinds.check(what, *given, stream)
            if runs:
                self._check_values(halo, stream)
            return halo

        return self._comparison.together(what, check)

    def _check_values(self, halo: Halo, stream: Any = None) -> None:
        """Raise NotFiniteError where a checking group would send NaN or infinity.

        An exchange sends what lies in halos only once it has filled them.
        """
        group = self._group
        if not group.nan_check:
            return
        shape = halo.shape
        moves = self._moves(
            halo, shape if halo.what == REDUCE else replace(shape, direct=True)
        )
        check_finite_boxes(group, halo.what, halo.arrays, moves, stream)

    def _halo(
        self,
        what: str,
        op: str | None,
        fields: Any,
        width: Any,
        axes: Any,
        corners: Any,
        direct: Any,
        nonblocking: Any,
        timeout_s: float | None,
        stream: Any,
    ) -> Any:
        options = what, width, axes, corners, direct, op
        done = NotImplemented
        if timeout_s is None and stream is None and type(nonblocking) is bool:
            done = self._run_again(fields, options, nonblocking)
            if done is not NotImplemented and done is not None:
                return done
        limit = self._comparison.limit(what, timeout_s)
        given = fields, width, axes, corners, direct, op
        halo = self._checked(what, given, nonblocking, stream, runs=True)
        arrays = halo.arrays

        def compare() -> None:
            facts = self._kinds.shared_facts(halo.kind)
            shapes = [array.shape for array in arrays]
            differs = done is None  # the ranks know it already
            if differs or not self._plans.agreed.fit(what, facts, limit, shapes):
                self._compare(halo)

        if halo.on is not None:
            boxes, agrees = self._plans.on_device(
                what,
                _own_arguments(halo),
                lambda: self._kinds.common_facts(halo),
                compare=compare,
                make=lambda: self._device_boxes(halo),
            )
            return boxes.run(
                *(arrays, fields, what, bool(nonblocking), limit, stream),
                agrees=agrees,
            )
        compare()
        plan = self._host_plan(halo)
        self._fronts.keep(options, _all(fields), lambda: self._front(halo))
        table, address = address_table(arrays)
        owners = (table, *(array.owner for array in arrays))
        return self._group.run_plan(
            plan, address, 0, owners, None, fields, what, bool(nonblocking), limit
        )

    def _run_again(
        self, fields: Any, options: tuple[Any, ...], nonblocking: bool
    ) -> Any:
        """Return what a call gives whose kind is known; else NotImplemented.

        None where the ranks' calls do not fit.
        """
        arrays = _all(fields)
        front = self._fronts.find(options, arrays)
        if front is None:
            return NotImplemented
        group = self._group
        group.check_usable()
        return front.run(group, arrays, fields, nonblocking, group.timeout_s)

    def _front(self, halo: Halo) -> _native.BoxFront:
        """Return what runs calls of this kind without Python."""
        kind = halo.kind
        return box_front(
            self._family(halo),
            kind.what,
            [(dtype, ndim, True) for dtype, ndim in kind.types],
            least=[
                (array, each.axis, sum(each.halo) + each.block)
                for array in range(len(kind.types))
                for each in kind.least
            ],
            facts=self._kinds.shared_facts(kind),
        )

    def _family(self, halo: Halo) -> _native.PlanFamily:
        """Return the family of a call on the host, made where there is none."""
        make = partial(self._template, halo)
        group = self._group
        return self._families.get(halo.kind.key, lambda: group.box_family(make()))

    def _compare(self, halo: Halo) -> None:
        """Raise MismatchError on all ranks unless their calls fit; collective."""
        shapes = [array.shape for array in halo.arrays]
        mine = {**equal_everywhere(halo.kind), "shapes": shapes}
        said = self._comparison.meet(halo.what, mine)
        check_agreement(self._group.name, self._grid, halo, said)

    def _agreed_plan(self, halo: Halo) -> Any:
        """Return the engine's plan of a call that fits all ranks' calls; collective."""
        self._compare(halo)
        return self._host_plan(halo) if halo.on is None else self._device_boxes(halo)

    def _host_plan(self, halo: Halo) -> _native.Plan:
        """Return the plan of arrays on the host, without the other ranks."""
        arrays = halo.arrays
        extents = [extent for array in arrays for extent in array.shape]
        strides = [stride for array in arrays for stride in array.strides]
        return self._group.box_plan(self._family(halo), extents, strides)

    def _template(self, halo: Halo) -> _native.BoxTemplate:
        """Return what makes the plans of all shapes: their extents are its numbers."""
        shapes: list[Any] = []
        for array in halo.arrays:
            first = sum(map(len, shapes))
            shapes.append(
                tuple(Place(first + axis) for axis in range(len(array.shape)))
            )
        return box_template(
            self._group,
            self._moves(halo, halo.shape, shapes),
            halo.kind.types,
            coll=other_call(halo.what).code,
            label=_label(halo),
            reduction=halo.reduction,
            facts=number_of_facts(equal_everywhere(halo.kind)),
        )

    def _device_boxes(self, halo: Halo) -> DeviceBoxes:
        """Return the plan of arrays on a device, without the other ranks."""
        carries = halo.shape.corners and not halo.shape.direct
        return DeviceBoxes(
            self._group,
            self._devices,
            halo.on,
            self._moves(halo, halo.shape),
            [array.layout for array in halo.arrays],
            phases=len(halo.shape.widths) if carries else 1,
            what=halo.what,
            coll=other_call(halo.what).code,
            label=_label(halo),
            reduction=halo.reduction,
            facts=number_of_facts(equal_everywhere(halo.kind)),
        )

    def _moves(self, halo: Halo, shape: HaloShape, shapes: Any = None) -> list[Move]:
        """Return this rank's moves; ``shapes`` stand for those of the arrays."""
        if shapes is None:
            shapes = [array.shape for array in halo.arrays]
        reverse = halo.what == REDUCE
        return halo_moves(self._grid, self._group.rank, shape, shapes, reverse=reverse)


def _all(fields: Any) -> tuple[Any, ...]:
    """Return the arrays of a call, of which it may have one or several."""
    return tuple(fields) if type(fields) in (tuple, list) else (fields,)


def _own_arguments(halo: Halo) -> tuple[Any, ...]:
    """Return all that this rank's plan depends on."""
    places = [(one.shape, one.strides, one.dtype.name) for one in halo.arrays]
    return halo.shape, halo.reduction, places, id(halo.on) if halo.on else None


def _label(halo: Halo) -> str:
    return "boxes/direct" if halo.shape.direct else "boxes/by_dimension"
