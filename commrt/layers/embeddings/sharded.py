# SPDX-License-Identifier: Apache-2.0
"""Bags of embeddings, whose tables lie on different ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.agreed_seed import agreed_seed
from commrt.layers.embeddings.agreement import Arguments, check_alike
from commrt.layers.embeddings.bags import Bags, flat_bags
from commrt.layers.embeddings.column_sums import ColumnSums
from commrt.layers.embeddings.exchange import Arrivals, Flags, meet, start, wait
from commrt.layers.embeddings.first_values import first_values
from commrt.layers.embeddings.layout import Layout
from commrt.layers.embeddings.placement import Placement
from commrt.layers.embeddings.planner import place
from commrt.layers.embeddings.route import Route
from commrt.layers.embeddings.tables import EmbeddingTable, checked_tables
from commrt.layers.embeddings.whole_rows import gathered_rows
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.parameter_cut import ParameterCut
from commrt.layers.tensor3d.roles import SAMPLE_AXES, Along, check_axes
from commrt.layers.tensor3d.whole_state import WholeState

__all__ = ["PendingRows", "ShardedEmbeddingBags"]

Tensor: TypeAlias = torch.Tensor
GivenBags: TypeAlias = Mapping[str, Bags | Tensor] | Sequence[Bags | Tensor]


class PendingRows:
    """Rows on their way to the ranks of their bags; ``wait()`` returns them, once."""

    def __init__(self, route: Route, arrivals: Arrivals, landing: Tensor) -> None:
        self._route = route
        self._trip = arrivals.trip
        self._landing: Tensor | None = landing
        # All ranks agreed on these when they started, so a backward pass needs them.
        self._has_gradients = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()

    def wait(self) -> tuple[Tensor, ...]:
        """Return (samples, embedding_dim) of each table, in their order.

        They have a gradient if ``start`` was called with gradients.
        """
        if self._landing is None:
            raise UsageError(
                "PendingRows.wait: its rows were returned before; keep them, or start "
                "again"
            )
        landing, self._landing = self._landing, None
        with (
            torch.inference_mode(self._is_inference),
            torch.set_grad_enabled(self._has_gradients),
        ):
            return self._rows(landing)

    def _rows(self, landing: Tensor) -> tuple[Tensor, ...]:
        route, layout = self._route, self._route.layout
        rows = wait(route, self._trip, landing)
        first = [sum(layout.slots[:number]) for number in range(len(layout.slots))]
        numbers = {unit: number for number, unit in enumerate(layout.units)}
        found = []
        for table, units in zip(layout.tables, layout.units_of_table, strict=True):
            parts = [rows[first[unit.row_class] + unit.slot] for unit in units]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            if table.mode == "mean":
                whole = whole / route.divisor(numbers[units[0]])
            found.append(whole)
        return tuple(found)


class ShardedEmbeddingBags(nn.Module, WholeState):  # type: ignore[misc]
    """torch's EmbeddingBags of several tables, which lie on different ranks.

        user, item = EmbeddingTable("user", 10**6, 64), EmbeddingTable("item", 500, 64)
        grid = ProcessGrid(comm, {"data": 0})
        bags = ShardedEmbeddingBags([user, item], grid=grid)
        users, items = bags([torch.tensor([[3, 14]]), torch.tensor([[159]])])

    Each rank has samples of its own, any number, also none. All ranks call the layer,
    and its backward pass, in the same order, and with gradients on all or on none.

    Args:
        tables: the same on all ranks.
        grid: the ranks; its axes are among ``data``, ``z`` and ``expert``.
        placement: where tables lie; None: as ``place`` says.
        limit_nbytes: bytes of tables that a rank has room for, for ``place``.
        is_sparse: True: gradients are sparse tensors of the touched rows. False: dense.
        device, dtype: of the rows; None: torch's defaults.

    Shapes: bags are given as for torch's EmbeddingBag: (samples, length) of integers,
    or ``Bags`` with offsets, and with weights where the table has ``is_weighted``. The
    result is a tuple with (samples, embedding_dim) of each table. Parameters:
    ``width_W`` of (this rank's rows, W), for tables and pieces of W columns, and
    ``width_W_weighted``. The names in states are those of the tables.

    Pattern, on p ranks with C classes of rows, for a rank whose bags name N rows in P
    pieces, and which is asked for Q pieces of M rows, all of e bytes an element: a
    piece is the part of a bag that one rank has, unless it is empty.

    - forward: an ``alltoall`` of 8 p (1 + 2 C); an ``alltoallv`` of 4 (N + P)
      for the indices, and of 4 N to a rank where each piece is one row; an
      ``alltoallv`` of the Q rows;
    - backward: an ``alltoallv`` of the P rows' gradients;
    - with weights: an ``alltoallv`` of N e; backward of M e, where weights are
      trained.

    One rank sends nothing. A table that is whole, or cut by columns, has the bits of
    torch's EmbeddingBag for ``"sum"``.

    Collective when it is made: ranks compare their arguments by an ``allgather`` of 40
    bytes for each rank, and draw the same values, from a seed of the first rank. Raises
    UsageError on all ranks, before anything is made, where the tables of one do not
    fit, or where ranks have other tables, shards, types or axes.
    """

    has_parts = True

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        *,
        grid: ProcessGrid,
        placement: Placement | None = None,
        limit_nbytes: int | None = None,
        is_sparse: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_axes("ShardedEmbeddingBags", grid, SAMPLE_AXES)
        self._grid = grid
        self.along = Along(grid, *grid.axes)
        """The ranks, in the order of places of the placement."""
        self.is_sparse = bool(is_sparse)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        try:
            placement = _checked_placement(placement, tables, grid, limit_nbytes, dtype)
        except Exception:
            self._refuse_arguments()
            raise
        tables = placement.tables
        own = Arguments(
            tuple(table.facts() for table in tables),
            sorted(placement.shards),
            (dtype, self.is_sparse),
            [*grid.shape.items()],
        )
        check_alike(self.along.comm, own)
        self.layout = Layout(placement)
        """The order of messages, and where each shard lies."""
        self._column_sums = ColumnSums(self.layout, self.along)
        # Its gradient asks all ranks for a backward pass, also those without rows.
        self._anchor = torch.empty(0, requires_grad=True, device="cpu")
        seed = agreed_seed(self.along.comm)
        sizes = self.layout.rows_of[self.along.place]
        for row_class, rows in zip(self.layout.classes, sizes, strict=True):
            shape = rows, row_class.width
            held = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            self.register_parameter(row_class.name, held)
        # A note for sync_gradients: gradients are sums over all ranks.
        self.grid_cuts = {
            name: ParameterCut(*(grid, tuple(held.shape), (), None, (), grid.axes))
            for name, held in self._parameters.items()
        }
        self._mark()
        with torch.no_grad():
            for shard, part in self._shards().values():
                part.copy_(first_values(tables, shard, seed, dtype))

    def _refuse_arguments(self) -> None:
        """Tell the others, or they would wait for this rank."""
        try:
            check_alike(self.along.comm, None)
        except UsageError:
            return  # this rank's own error says more

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        """All tables."""
        return self.layout.tables

    @property
    def placement(self) -> Placement:
        """Where tables lie; ``print(bags.placement.explain())`` shows it."""
        return self.layout.placement

    @property
    def grid(self) -> ProcessGrid:
        """The ranks."""
        return self._grid

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedEmbeddingBags:
        """Return a copy that works on the same ranks."""
        memo[id(self._grid)] = self._grid
        made: ShardedEmbeddingBags = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made._mark()
        return made

    def _mark(self) -> None:
        """Note on each parameter how it is cut: a copy of one has lost that."""
        for number, row_class in enumerate(self.layout.classes):
            held = self._parameters[row_class.name]
            held.grid_cut = self.grid_cuts[row_class.name]
            held.column_sums = self._column_sums.of_class(number)

    # -- rows --------------------------------------------------------------------------

    def forward(self, bags: GivenBags) -> tuple[Tensor, ...]:
        """Return (samples, embedding_dim) of each table, in their order; collective.

        Args:
            bags: a list in the order of tables, or a mapping from their names; each
                entry a tensor (samples, length) or ``Bags``.

        Raises UsageError on all ranks, before any index is sent, where the bags of one
        do not fit.
        """
        return self.start(bags).wait()

    def start(self, bags: GivenBags) -> PendingRows:
        """Look rows up and start to send them, for a program that computes meanwhile.

            pending = bags.start(given)
            hidden = bottom(dense)
            rows = pending.wait()

        Backward, gradients travel while the backward pass of what was computed between
        the two runs. Arguments and errors are those of the call.
        """
        layout, comm = self.layout, self.along.comm
        held = [self._parameters[each.name] for each in layout.classes]
        has_gradients = torch.is_grad_enabled()
        try:
            route = Route(flat_bags(layout.tables, bags, held[0]), layout)
        except Exception:
            if comm is not None:  # or the others would wait for this rank
                self._refuse(comm, has_gradients)
            raise
        weights = route.weights
        trains_weights = weights is not None and weights.requires_grad
        flags = Flags(False, has_gradients, trains_weights)
        coming, trains_weights = meet(comm, flags, route.counts, layout)
        arrivals = Arrivals(comm, route, coming)
        landing = start(
            *(route, arrivals, held, self._anchor),
            trains_weights=trains_weights,
            is_sparse=self.is_sparse,
        )
        return PendingRows(route, arrivals, landing)

    def _refuse(self, comm: Communicator, has_gradients: bool) -> None:
        """Tell the others that this rank's bags do not fit."""
        try:
            meet(comm, Flags(True, has_gradients, False), None, self.layout)
        except UsageError:
            return  # this rank's own error says more

    # -- state of the serial tables ----------------------------------------------------

    def _shards(self, *, keep_vars: bool = False) -> dict[str, tuple[Any, Tensor]]:
        """Return this rank's shards and their rows by the serial parameters' names."""
        found = {}
        for shard, row_class, base in self.layout.own(self.along.place):
            held = self._parameters[row_class.name]
            part = (held if keep_vars else held.detach())[base : base + shard.num_rows]
            found[f"{self.tables[shard.table].name}.weight"] = shard, part
        return found

    def whole_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a whole table by its name in states; None of others."""
        for table in self.tables:
            if name == f"{table.name}.weight":
                return table.num_embeddings, table.embedding_dim
        return None

    def has_elsewhere(self, name: str) -> bool:
        """Return whether a name in the state is of a table of other ranks."""
        return self.whole_shape(name) is not None and name not in self._shards()

    def gathered(self) -> dict[str, Any]:
        """Return all tables, whole; collective.

        Bytes: a ``bcast`` of each shard from the rank that has it.
        """
        held = [self._parameters[each.name].detach() for each in self.layout.classes]
        wholes = gathered_rows(self.layout, self.along, held)
        return {f"{name}.weight": whole for name, whole in wholes.items()}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Put this rank's shards under the names of their tables."""
        for name, (_, part) in self._shards(keep_vars=keep_vars).items():
            destination[prefix + name] = part

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load whole tables, or this rank's shards of them."""
        for name, (shard, part) in self._shards().items():
            given = state_dict.get(prefix + name)
            whole = self.whole_shape(name)
            if given is None:
                missing_keys.append(prefix + name)
                continue
            if tuple(given.shape) == whole:
                given = given[slice(*shard.rows), slice(*shard.columns)]
            if given.shape != part.shape:
                error_msgs.append(
                    f"{prefix}{name} has the shape {tuple(given.shape)}; expected "
                    f"{whole}, the whole table's, or {tuple(part.shape)}, this rank's"
                )
                continue
            with torch.no_grad():
                part.copy_(given)
        if strict:
            unexpected_keys += [
                key
                for key in state_dict
                if key.startswith(prefix)
                and self.whole_shape(key.removeprefix(prefix)) is None
            ]

    def extra_repr(self) -> str:
        """Return the tables' number and the grid, for ``print(model)``."""
        return f"{len(self.tables)} tables, grid={self._grid.shape}"


def _checked_placement(
    placement: Any,
    tables: Sequence[EmbeddingTable],
    grid: ProcessGrid,
    limit_nbytes: int | None,
    dtype: Any,
) -> Placement:
    """Return the given placement, or a new one; UsageError where it does not fit."""
    tables = checked_tables("ShardedEmbeddingBags", tables)
    if not getattr(dtype, "is_floating_point", False):
        raise UsageError(
            f"ShardedEmbeddingBags: dtype={shown(dtype)} must be a type of torch for "
            f"floating-point numbers"
        )
    if placement is None:
        return place(
            *(tables, grid.num_ranks),
            limit_nbytes=limit_nbytes,
            itemsize=dtype.itemsize,
        )
    if limit_nbytes is not None:
        raise UsageError(
            "ShardedEmbeddingBags: give placement, or limit_nbytes for place; one of "
            "the two"
        )
    if not isinstance(placement, Placement):
        raise UsageError(
            f"ShardedEmbeddingBags: placement={shown(placement)} must be a Placement, "
            f"as place() returns it"
        )
    if len(placement.tables) == len(tables):
        for number, (placed, given) in enumerate(
            zip(placement.tables, tables, strict=True)
        ):
            if placed != given:
                raise UsageError(
                    f"ShardedEmbeddingBags: table {number} of the placement is "
                    f"{placed}; expected the given one, {given}"
                )
    if placement.tables != tables or placement.num_ranks != grid.num_ranks:
        raise UsageError(
            f"ShardedEmbeddingBags: the placement is of "
            f"{len(placement.tables)} tables on {placement.num_ranks} ranks; expected "
            f"the same {len(tables)} tables as given, on {grid.num_ranks} ranks"
        )
    return placement
