# SPDX-License-Identifier: Apache-2.0
"""Collectives among neighbours, on a grid or a graph of ranks, as MPI_Neighbor_* are.

Block k of what a rank sends goes to its k-th neighbour. On a grid these are, dimension
by dimension, the one before and the one behind; what goes to the one before arrives
there as from behind, also where both are the same rank, or this one. Where there is
nobody, nothing is sent, and that part of the output stays as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from commrt import _native
from commrt.arrays.device import as_stream, current_stream_of, place_of
from commrt.arrays.host import view_anywhere
from commrt.arrays.places import places_of
from commrt.arrays.plain import as_array
from commrt.boxes.fronts import ANY_SHAPE, Fronts, box_front
from commrt.boxes.host_plans import Place, box_template
from commrt.boxes.strided import address_table
from commrt.boxes.words import words_of_moves
from commrt.calls.bound_call import Binders
from commrt.calls.families import Families
from commrt.device_calls.collectives import DeviceCollectives
from commrt.errors import CommError, MismatchError
from commrt.grids.halo_arguments import HALO_CALLS
from commrt.grids.neighbor_arguments import (
    BoundBlocks,
    Counts,
    Neighborhood,
    bind_blocks,
    blocks_of,
    moves_of,
    out_shape,
)
from commrt.grids.on_device import (
    BoundNeighbors,
    carried_neighbors,
    staged_neighbors,
)
from commrt.group.compare import Comparison
from commrt.group.finite_values import check_finite_on_stream
from commrt.group.group import Group
from commrt.planning.kept_plans import KeptPlans
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.dtypes import DType
from commrt.vocabulary.operations import names_of, other_call

__all__ = ["NeighborCalls"]

_Arguments = tuple[Any, Any, Counts, Counts]
"""The arrays x and out, and the counts sent and received."""


class NeighborCalls:
    """The neighbour collectives of a communicator over a grid or a graph.

    Collective: all ranks call the same. ``nonblocking`` and ``timeout_s`` as ever.

    Args:
        group: the ranks.
        around: who is beside this rank.
        devices: moves blocks of arrays on devices.
        comparison: compares the calls of all ranks in check mode.
        families: keeps what host calls have in common that differ in counts.
    """

    def __init__(
        self,
        group: Group,
        around: Neighborhood,
        devices: DeviceCollectives,
        comparison: Comparison,
        families: Families,
    ) -> None:
        self._group, self._around = group, around
        self._devices, self._comparison = devices, comparison
        self._families = families
        self._fronts = Fronts()
        self.plans: KeptPlans[Any] = KeptPlans(group)
        """Plans of calls on device arrays."""

    def neighbor_allgather(
        self,
        x: Any,
        *,
        out: Any = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Send ``x`` to every neighbour; return theirs, in the order of the sources.

        ``out`` has as many blocks as there are sources, each of the length of ``x``;
        allocated with zeros, of shape ``(sources, *x.shape)``.
        """
        how = nonblocking, timeout_s, stream
        return self._neighbor("neighbor_allgather", x, out, None, None, *how)

    def neighbor_allgatherv(
        self,
        x: Any,
        *,
        recv_counts: Counts,
        out: Any = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Like ``neighbor_allgather``, with an ``x`` of any length on each rank.

        ``recv_counts`` are the elements that come from each source.
        """
        how = nonblocking, timeout_s, stream
        return self._neighbor("neighbor_allgatherv", x, out, None, recv_counts, *how)

    def neighbor_alltoall(
        self,
        x: Any,
        *,
        out: Any = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Send the k-th of equal blocks of ``x`` to the k-th destination."""
        how = nonblocking, timeout_s, stream
        return self._neighbor("neighbor_alltoall", x, out, None, None, *how)

    def neighbor_alltoallv(
        self,
        x: Any,
        *,
        send_counts: Counts,
        recv_counts: Counts,
        out: Any = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Send blocks of ``send_counts`` elements, one after another in ``x``.

        ``recv_counts`` are the elements that come from each source.
        """
        given = x, out, send_counts, recv_counts
        how = nonblocking, timeout_s, stream
        return self._neighbor("neighbor_alltoallv", *given, *how)

    def sent_nbytes(
        self, what: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> int:
        """Return the bytes that a call with these arguments sends to other ranks."""
        given = args[0] if args else more.get("x")
        x = view_anywhere(as_array(given, f"{what}: x"), f"{what}: x")
        nobody = (None, self._group.rank)
        others = [peer not in nobody for peer in self._around.destinations]
        row = other_call(what)
        if row.sends_whole:
            return sum(others) * x.nbytes
        if not row.count_arguments:
            return sum(others) * (x.nbytes // max(1, len(others)))
        counts = zip(more.get(row.count_arguments[0], ()), others, strict=False)
        return sum(int(count) for count, other in counts if other) * x.dtype.itemsize

    def _neighbor(
        self,
        what: str,
        x: Any,
        out: Any,
        sends: Counts,
        receives: Counts,
        nonblocking: Any,
        timeout_s: float | None,
        stream: Any,
    ) -> Any:
        group = self._group
        if timeout_s is None and stream is None and type(nonblocking) is bool:
            done = self._run_again(what, x, out, sends, receives, nonblocking)
            if done is not NotImplemented:
                return done
        here = f"{what}, rank {group.rank}"
        limit = self._comparison.limit(what, timeout_s, here=here)
        arguments = (as_array(x, f"{here}: x"), out, sends, receives)
        bound = self._checked(what, arguments, limit, nonblocking, stream, runs=True)
        plan = self._plan(bound, limit, stream)
        if bound.on is not None:
            look = partial(self._check_values, bound)
            call = BoundNeighbors(group, self._devices, plan, bound, look)
            return call.run(bool(nonblocking), limit, stream)
        given = bound.x.array, bound.out.array
        self._fronts.keep((what,), given, lambda: self._front(bound))
        table, address = address_table((bound.x, bound.out))
        owners = table, bound.x.owner, bound.out.owner
        how = what, bool(nonblocking), limit
        return group.run_plan(plan, address, 0, owners, None, bound.result, *how)

    def _run_again(
        self,
        what: str,
        x: Any,
        out: Any,
        sends: Counts,
        receives: Counts,
        nonblocking: bool,
    ) -> Any:
        """Return what a call gives whose kind is known; else NotImplemented."""
        if type(x) is not np.ndarray:
            return NotImplemented
        group, around, row = self._group, self._around, other_call(what)
        given = x.size, out, sends, receives
        try:
            leaving, coming = blocks_of(group.rank, around, row, what, *given)
        except CommError:
            return NotImplemented  # where it is raised, the other ranks hear of it
        if out is None:
            try:
                out = np.zeros(out_shape(around, row, x.shape, coming), x.dtype)
            except (MemoryError, ValueError):
                return NotImplemented
        front = self._fronts.find((what,), (x, out))
        if front is None:
            return NotImplemented
        group.check_usable()
        return front.run(
            *(group, (x, out), out, nonblocking, group.timeout_s),
            numbers=[at for block in (*leaving, *coming) for at in block],
            sizes=[x.size, coming[-1][1] if coming else 0],
        )

    def _front(self, bound: BoundBlocks) -> _native.BoxFront:
        """Return what runs calls of this kind without Python."""
        dtype = bound.x.dtype
        arrays = [(dtype, ANY_SHAPE, written) for written in (False, True)]
        return box_front(self._family(bound), bound.what, arrays)

    @property
    def binders(self) -> Binders:
        """Binders of the exchanges among neighbours, by name."""
        return {
            name: partial(self._bound, name)
            for name in names_of("neighbors")
            if name not in HALO_CALLS
        }

    def _bound(
        self,
        what: str,
        x: Any,
        *,
        out: Any,
        send_counts: Counts = None,
        recv_counts: Counts = None,
    ) -> _native.PersistentCall | BoundNeighbors:
        """Return the call bound to its arrays; see ``NeighborPlans``."""
        group = self._group
        bound = self._checked(what, (x, out, send_counts, recv_counts), group.timeout_s)
        plan = self._plan(bound, group.timeout_s)
        if bound.on is not None:
            look = partial(self._check_values, bound)
            return BoundNeighbors(group, self._devices, plan, bound, look)
        table, address = address_table((bound.x, bound.out))
        owners = (table, bound.x.owner, bound.out.owner)
        return _native.PersistentCall(
            *(group, plan, address, 0, owners, None, bound.result, what),
            places_of([bound.x.array, bound.out.array]),
            look=partial(self._check_values, bound),
        )

    def _checked(
        self,
        what: str,
        arguments: _Arguments,
        timeout_s: float,
        nonblocking: Any = False,
        stream: Any = None,
        *,
        runs: bool = False,
    ) -> BoundBlocks:
        """Return the call, checked; in check mode also against all ranks.

        ``runs``: with the values, since the call runs now.
        """
        group = self._group
        group.check_usable()

        def check() -> BoundBlocks:
            here = f"{what}, rank {group.rank}"
            check_flag(here, "nonblocking", nonblocking)
            found = bind_blocks(group.rank, self._around, what, here, *arguments)
            place_of(here, [found.x, found.out], stream)
            if runs:
                self._check_values(found, stream)
            return found

        def describe(bound: BoundBlocks) -> dict[str, Any]:
            return {"dtype": bound.x.dtype.name}

        bound: BoundBlocks = self._comparison.together(
            what, check, timeout_s=timeout_s, describe=describe
        )
        if group.checker is not None:
            self._compare(bound, timeout_s)
        return bound

    def _check_values(self, bound: BoundBlocks, stream: Any = None) -> None:
        """Raise NotFiniteError where a checking group would send NaN or infinity."""
        group = self._group
        if not group.nan_check:
            return
        parts = zip(self._around.destinations, bound.sends, strict=True)
        others = (None, group.rank)
        for part in sorted({part for peer, part in parts if peer not in others}):
            check_finite_on_stream(group, bound.what, bound.x, stream, part=part)

    def _plan(self, bound: BoundBlocks, timeout_s: float, stream: Any = None) -> Any:
        """Return the engine's plan; the first one of device arrays is collective."""
        if bound.on is None:
            return self._host_plan(bound)
        if stream is None:
            handle = current_stream_of(bound.x.array, bound.on)
        else:
            handle = as_stream(stream, bound.on, bound.what)
        carrier = self._devices.box_carrier(bound.on, bound.what, handle, timeout_s)
        where = self._devices.name_of(carrier)
        key = (bound.what, bound.x.dtype.code, bound.sends, bound.receives, where)
        plan = self.plans.find(key)
        if plan is None:
            if carrier is not None:
                code = other_call(bound.what).code
                plan = carried_neighbors(carrier, bound, code)
            else:
                plan = staged_neighbors(self._around, bound, self._host_plan(bound))
            plan.words = words_of_moves(
                *(bound.what, self._devices.name_of(carrier), [bound.moves]),
                coll=other_call(bound.what).code,
                dtype=bound.x.dtype,
                stated=True,
            )
            self.plans.keep(key, plan)
        return plan

    def _host_plan(self, bound: BoundBlocks) -> _native.Plan:
        """Return the plan of a call on the host, without the other ranks."""
        itemsize = bound.x.dtype.itemsize
        numbers = [at for pair in (*bound.sends, *bound.receives) for at in pair]
        family = self._family(bound)
        return self._group.box_plan(family, numbers, [itemsize, itemsize])

    def _family(self, bound: BoundBlocks) -> _native.PlanFamily:
        """Return the family of a call on the host, made where there is none."""
        group, dtype = self._group, bound.x.dtype
        return self._families.get(
            (bound.what, dtype.code),
            lambda: group.box_family(self._template(bound.what, dtype)),
        )

    def _template(self, what: str, dtype: DType) -> _native.BoxTemplate:
        """Return what makes the plans of all counts: where blocks begin and end."""
        around = self._around
        ways = len(around.destinations), len(around.sources)
        places: list[Any] = [(Place(2 * i), Place(2 * i + 1)) for i in range(sum(ways))]
        blocks = tuple(places[: ways[0]]), tuple(places[ways[0] :])
        return box_template(
            self._group,
            moves_of(around, self._group.rank, *blocks),
            [(dtype, 1), (dtype, 1)],
            coll=other_call(what).code,
            label="boxes/direct",
            stated=True,
        )

    def _compare(self, bound: BoundBlocks, timeout_s: float) -> None:
        """Raise the same MismatchError on all ranks unless sends fit receives."""
        group = self._group
        size = bound.x.dtype.itemsize
        sent, expected = [], []
        for move in bound.moves:
            if move.source is not None and move.peer is not None:
                sent.append(
                    [group.rank, move.peer, move.number, move.source.count * size]
                )
            elif move.target is not None and move.peer is not None:
                expected.append(
                    [move.peer, group.rank, move.number, move.target.count * size]
                )
        said = self._comparison.meet(bound.what, [sent, expected], timeout_s)
        leaving = {tuple(row[:3]): row[3] for each in said for row in each[0]}
        coming = {tuple(row[:3]): row[3] for each in said for row in each[1]}
        for edge, nbytes in sorted(leaving.items()):
            if coming.get(edge) != nbytes:
                raise MismatchError(
                    f"{bound.what} on {group.name}: rank {edge[0]} sends {nbytes} "
                    f"bytes to rank {edge[1]}, which expects {coming.get(edge, 0)}; "
                    f"nothing was sent; give both ranks equal counts"
                )
