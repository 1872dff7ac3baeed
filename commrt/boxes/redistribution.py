# SPDX-License-Identifier: Apache-2.0
"""Redistribution: an array from one layout to another, planned once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from commrt import _native
from commrt.arrays.device import place_of
from commrt.arrays.host import empty_like_array, view_anywhere
from commrt.arrays.places import places_of
from commrt.boxes.compared import ComparedBoxes
from commrt.boxes.device_plans import BoundBoxes, DeviceBoxes
from commrt.boxes.finite_boxes import check_finite_boxes
from commrt.boxes.fronts import Fronts, box_front
from commrt.boxes.host_plans import box_template
from commrt.boxes.layouts import (
    Layout,
    Runs,
    common_runs,
)
from commrt.boxes.strided import (
    StridedArray,
    address_table,
    check_apart,
    check_writable,
    strided,
)
from commrt.calls.bound_call import Binders
from commrt.calls.families import Families
from commrt.device_calls.collectives import DeviceCollectives
from commrt.errors import BufferError_, UsageError, shown
from commrt.group.agreed_calls import SharedFact, fact_number
from commrt.group.compare import Comparison
from commrt.group.group import Group
from commrt.planning.facts import number_of_facts
from commrt.schedule.boxes import Box, Move
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.dtypes import DType
from commrt.vocabulary.operations import other_call

__all__ = [
    "Redistribution",
    "Redistributions",
    "redistribution_moves",
    "redistribution_template",
]

_NAME = "redistribute"
_CODE = other_call(_NAME).code
_X, _OUT = 0, 1


def redistribution_moves(source: Layout, target: Layout, rank: int) -> list[Move]:
    """Return the moves of one rank; array 0 is its part before, array 1 behind."""
    moves = []
    for peer in range(source.size):
        if source.holder(peer, rank):
            to = None if peer == rank else peer
            for number, (box, there) in enumerate(_boxes(source, rank, target, peer)):
                whole = there if to is None else None
                moves.append(Move(0, number, to, box, whole))
        if peer != rank and source.holder(rank, peer):
            for number, (_, there) in enumerate(_boxes(source, peer, target, rank)):
                moves.append(Move(0, number, peer, None, there))
    return moves


def _boxes(
    source: Layout, holder: int, target: Layout, taker: int
) -> Iterator[tuple[Box, Box]]:
    """Yield the parts that one rank has and another wants, as either sees it."""
    for runs in itertools.product(*common_runs(source, holder, target, taker)):
        yield (
            _box(_X, runs, [(run.source, run.source_step) for run in runs]),
            _box(_OUT, runs, [(run.target, run.target_step) for run in runs]),
        )


def _box(array: int, runs: tuple[Runs, ...], own: list[tuple[int, int]]) -> Box:
    """Return the box of runs in every dimension: which run, then where in it."""
    start, stop, axes = [], [], []
    for axis, (run, (begin, step)) in enumerate(zip(runs, own, strict=True)):
        if run.count > 1:
            start.append(0)
            stop.append(run.count)
            axes.append((axis, step))
        start.append(begin)
        stop.append(begin + run.length)
        axes.append((axis, 1))
    return Box(array, tuple(start), tuple(stop), tuple(axes))


@dataclass(frozen=True)
class Redistribution:
    """The arguments of a call, checked as far as one rank can."""

    source: Layout
    target: Layout
    sent: StridedArray
    taken: StridedArray
    out: Any
    """The output as the caller knows it."""
    on: Any
    """The device that the arrays are on; None for host memory."""

    @property
    def kind(self) -> tuple[str, str, str, bool]:
        """All in which calls are alike that differ in lengths alone."""
        dtype = self.sent.dtype.name
        return self.source.kind, self.target.kind, dtype, self.on is None

    @property
    def numbers(self) -> list[int]:
        """The lengths in which they differ."""
        return [*self.source.numbers, *self.target.numbers]


@lru_cache(maxsize=256)
def _kind_number(kind: tuple[str, str, str, bool]) -> int:
    return fact_number((_NAME, kind))


def redistribution_template(
    group: Group, layouts: tuple[Layout, Layout], dtype: DType
) -> _native.BoxTemplate:
    """Return what makes the plans of all lengths of two kinds of layouts."""
    arrays = [(dtype, len(layout.shape)) for layout in layouts]
    return box_template(
        *(group, [], arrays),
        coll=_CODE,
        label="boxes/direct",
        facts=number_of_facts(*(layout.kind for layout in layouts), dtype.name),
        layouts=layouts,
    )


class Redistributions:
    """Moves arrays of one communicator between distributions.

    Args:
        group: the ranks.
        devices: moves arrays on devices.
        comparison: compares the arguments of all ranks.
        plans: keeps plans for calls that have none at hand.
        families: keeps what host calls have in common that differ in shapes.
    """

    def __init__(
        self,
        group: Group,
        devices: DeviceCollectives,
        comparison: Comparison,
        plans: ComparedBoxes,
        families: Families,
    ) -> None:
        self._group, self._devices = group, devices
        self._comparison, self._plans = comparison, plans
        self._families = families
        self._fronts = Fronts()

    def redistribute(
        self,
        x: Any,
        source: Layout,
        target: Layout,
        *,
        out: Any = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Move an array from one distribution to another; return this rank's part.

        As ``plan.redistribute``, with its arguments. A call whose arrays are laid out
        like those of an earlier call uses its plan. With host arrays the ranks find out
        by a reduction of 8 bytes whether their arguments fit, and a nonblocking call
        waits for it, too. With arrays on devices they compare them on the way.
        """
        done = NotImplemented
        if timeout_s is None and stream is None and type(nonblocking) is bool:
            done = self._run_again(x, source, target, out, nonblocking)
            if done is not NotImplemented and done is not None:
                return done
        limit = self._comparison.limit(_NAME, timeout_s)
        moved = self._moved(x, source, target, out, nonblocking, stream, runs=True)
        arrays, numbers = [moved.sent, moved.taken], moved.numbers

        def compare() -> None:
            fact = self._shared_fact(moved)
            differs = done is None  # the ranks know it already
            agreed = self._plans.agreed
            if differs or not agreed.fit(_NAME, [fact], limit, numbers=numbers):
                self._compare(moved)

        if moved.on is not None:
            strides = [each.strides for each in arrays]
            boxes, agrees = self._plans.on_device(
                _NAME,
                (*common_facts(moved).values(), strides, id(moved.on)),
                lambda: common_facts(moved),
                compare=compare,
                make=lambda: self._device_boxes(moved),
            )
            return boxes.run(
                *(arrays, moved.out, _NAME, bool(nonblocking), limit, stream),
                agrees=agrees,
            )
        compare()
        plan = self._host_plan(moved)
        options = source.kind, target.kind
        self._fronts.keep(options, (x, moved.out), lambda: self._front(moved))
        table, address = address_table(arrays)
        owners = (table, *(array.owner for array in arrays))
        result = moved.out
        return self._group.run_plan(
            plan, address, 0, owners, None, result, _NAME, bool(nonblocking), limit
        )

    def _run_again(
        self, x: Any, source: Any, target: Any, out: Any, nonblocking: bool
    ) -> Any:
        """Return what a call gives whose kind is known; else NotImplemented.

        None where the ranks' calls do not fit.
        """
        if type(source) is not Layout or type(target) is not Layout:
            return NotImplemented
        if source.shape != target.shape or type(x) is not np.ndarray:
            return NotImplemented
        group, rank = self._group, self._group.rank
        if source.size != group.size or target.size != group.size:
            return NotImplemented
        made = target.local_shape(rank)
        if out is None:
            try:
                out = np.empty(made, x.dtype)
            except (MemoryError, ValueError):
                return NotImplemented  # where it is raised, the other ranks hear of it
        front = self._fronts.find((source.kind, target.kind), (x, out))
        if front is None:
            return NotImplemented
        group.check_usable()
        return front.run(
            *(group, (x, out), out, nonblocking, group.timeout_s),
            numbers=[*source.numbers, *target.numbers],
            sizes=[*source.local_shape(rank), *made],
        )

    def _front(self, moved: Redistribution) -> _native.BoxFront:
        """Return what runs calls of this kind without Python."""
        arrays = moved.sent, moved.taken
        return box_front(
            self._family(moved),
            _NAME,
            [(one.dtype, len(one.shape), one is moved.taken) for one in arrays],
            facts=[self._shared_fact(moved)],
        )

    def _shared_fact(self, moved: Redistribution) -> SharedFact:
        """Return the fact that ranks share: the layouts, and the element type."""
        group = self._group
        number = _kind_number(moved.kind)
        return SharedFact(number, group.size, group.rank == 0, extents=None)

    @property
    def binders(self) -> Binders:
        """Binders of the operation, by name."""
        return {_NAME: self._bound}

    def _bound(
        self, x: Any, source: Layout, target: Layout, *, out: Any
    ) -> _native.PersistentCall | BoundBoxes:
        """Return the persistent call; see ``Plans.redistribute``. Collective."""
        moved = self._moved(x, source, target, out)
        plan = self._agreed_boxes(moved)
        arrays = [moved.sent, moved.taken]
        if moved.on is not None:
            look = partial(self._check_values, moved)
            return BoundBoxes(self._group, plan, arrays, moved.out, _NAME, look)
        table, address = address_table(arrays)
        owners = (table, moved.sent.owner, moved.taken.owner)
        return _native.PersistentCall(
            *(self._group, plan, address, 0, owners, None, moved.out, _NAME),
            places_of([moved.sent.array, moved.taken.array]),
            look=partial(self._check_values, moved),
        )

    def _moved(
        self,
        x: Any,
        source: Any,
        target: Any,
        out: Any,
        nonblocking: Any = False,
        stream: Any = None,
        *,
        runs: bool = False,
    ) -> Redistribution:
        """Return the arguments of a call, checked as far as one rank can.

        ``runs``: with the values, since the call runs now.
        """
        group = self._group
        group.check_usable()

        def check() -> Redistribution:
            check_flag(f"{_NAME}, rank {group.rank}", "nonblocking", nonblocking)
            found = _checked(group, x, source, target, out)
            on = place_of(_NAME, found[:2], stream)
            moved = Redistribution(source, target, *found, on)
            if runs:
                self._check_values(moved, stream)
            return moved

        return self._comparison.together(_NAME, check)

    def _check_values(self, moved: Redistribution, stream: Any = None) -> None:
        """Raise NotFiniteError where a checking group would send NaN or infinity."""
        group = self._group
        if not group.nan_check:
            return
        moves = redistribution_moves(moved.source, moved.target, group.rank)
        check_finite_boxes(group, _NAME, [moved.sent, moved.taken], moves, stream)

    def _compare(self, moved: Redistribution) -> None:
        """Raise MismatchError on all ranks unless their calls fit; collective."""
        said = (
            f"source={moved.source}, target={moved.target}, "
            f"dtype={moved.sent.dtype.name}"
        )
        if moved.on is not None:
            said += ", on a device"
        self._comparison.meet_equal(_NAME, said)

    def _agreed_boxes(self, moved: Redistribution) -> Any:
        """Return the plan of a call that is the same on all ranks; collective."""
        self._compare(moved)
        return self._host_plan(moved) if moved.on is None else self._device_boxes(moved)

    def _host_plan(self, moved: Redistribution) -> _native.Plan:
        """Return the plan of arrays on the host, without the other ranks."""
        strides = [*moved.sent.strides, *moved.taken.strides]
        return self._group.box_plan(self._family(moved), moved.numbers, strides)

    def _family(self, moved: Redistribution) -> _native.PlanFamily:
        """Return the family of a call on the host, made where there is none."""
        group, dtype = self._group, moved.sent.dtype
        layouts = moved.source, moved.target
        return self._families.get(
            (_NAME, *moved.kind),
            lambda: group.box_family(redistribution_template(group, layouts, dtype)),
        )

    def _device_boxes(self, moved: Redistribution) -> DeviceBoxes:
        """Return the plan of arrays on a device, without the other ranks."""
        return DeviceBoxes(
            self._group,
            self._devices,
            moved.on,
            redistribution_moves(moved.source, moved.target, self._group.rank),
            [moved.sent.layout, moved.taken.layout],
            phases=1,
            what=_NAME,
            coll=_CODE,
            label="boxes/direct",
            facts=number_of_facts(common_facts(moved)),
        )


def common_facts(moved: Redistribution) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks."""
    return {
        "source": str(moved.source),
        "target": str(moved.target),
        "dtype": moved.sent.dtype.name,
    }


def _checked(
    group: Group, x: Any, source: Any, target: Any, out: Any
) -> tuple[StridedArray, StridedArray, Any]:
    """Return this rank's parts, and ``out``; UsageError says what is wrong here."""
    _check_layouts(group, source, target)
    sent = _part(group, "x", x, source)
    if out is None:
        out = _allocated(x, target.local_shape(group.rank))
    taken = _part(group, "out", out, target)
    if sent.dtype is not taken.dtype:
        raise BufferError_(
            f"{taken.what} has dtype {taken.dtype.name}, x has {sent.dtype.name}; they "
            f"must be equal"
        )
    check_writable(taken)
    check_apart([sent, taken])
    return sent, taken, out


def _check_layouts(group: Group, source: Any, target: Any) -> None:
    here = f"{_NAME}, rank {group.rank}"
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise UsageError(f"{here}: {name}={shown(layout)} must be a commrt.Layout")
        if layout.size != group.size:
            raise UsageError(
                f"{here}: {name} has grid={layout.grid} with {layout.size} places, "
                f"expected {group.size}, one for each rank of {group.name}"
            )
    if source.shape != target.shape:
        raise UsageError(
            f"{here}: source has shape {source.shape} and target {target.shape}; they "
            f"must be layouts of the same array"
        )


def _part(group: Group, name: str, array: Any, layout: Layout) -> StridedArray:
    found = strided(array, f"{_NAME}, rank {group.rank}: {name}")
    expected = layout.local_shape(group.rank)
    if found.shape != expected:
        raise UsageError(
            f"{found.what} has shape {found.shape}, expected {expected} by its layout"
        )
    return found


def _allocated(x: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(x, np.ndarray):
        return np.empty(shape, x.dtype)
    seen = view_anywhere(x, f"{_NAME}: x", any_strides=True)
    return empty_like_array(seen, shape)
