# SPDX-License-Identifier: Apache-2.0
"""The order in which indices and rows travel, the same on all ranks.

A *unit* is a table, or one of the pieces of columns that it is cut into. A *bag* of a
unit goes to each rank that has rows of its indices: there its *piece* is looked up, and
one row comes back. Units of one width whose bags have weights, or have none, are a
*class*. A rank keeps all its rows of a class in one parameter, so it looks them up in
one call. Messages are in the order of ranks, then of classes, then of tables, then of
samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.layers.embeddings.placement import Placement, Shard

__all__ = ["Layout", "RowClass", "Unit"]

Tensor: TypeAlias = torch.Tensor


class RowClass(NamedTuple):
    """Rows that lie in one parameter."""

    width: int
    is_weighted: bool

    @property
    def name(self) -> str:
        """The parameter's name."""
        return f"width_{self.width}" + ("_weighted" if self.is_weighted else "")


class Unit(NamedTuple):
    """A table, or a piece of its columns."""

    table: int
    columns: tuple[int, int]
    row_class: int
    """The number of its class."""
    slot: int
    """Its number among the units of its class."""


class Layout:
    """The order of messages, and where each rank keeps its rows.

    Args:
        placement: of all tables.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.tables = placement.tables
        self.num_ranks = placement.num_ranks
        keys = {self._key(shard) for shard in placement.shards}
        self.classes = tuple(sorted(keys))
        """Classes, alike on all ranks; a rank may have no rows of one."""
        numbers = {key: number for number, key in enumerate(self.classes)}
        self.shards = tuple(
            sorted(
                placement.shards,
                key=lambda s: (s.rank, numbers[self._key(s)], s.table, s.columns),
            )
        )
        """All shards, in the order of messages."""
        self.class_of = tuple(numbers[self._key(shard)] for shard in self.shards)
        """The number of each shard's class."""
        bases, filled = [], [[0] * len(keys) for _ in range(self.num_ranks)]
        for shard, number in zip(self.shards, self.class_of, strict=True):
            bases.append(filled[shard.rank][number])
            filled[shard.rank][number] += shard.num_rows
        self.bases = tuple(bases)
        """The row of its rank's parameter where each shard begins."""
        self.rows_of = tuple(map(tuple, filled))
        """Rows of each class, by rank."""
        self.units = self._units()
        """In the order of their first shards' messages."""
        self.is_static = len(self.units) == len(self.shards)
        """True if no table is cut by rows: messages are in the order of units."""
        self.least_rows = min(table.num_embeddings for table in self.tables)
        """Rows of the smallest table."""
        self.index_type = torch.int32
        if max(max(rows) for rows in self.rows_of) >= 2**31:
            self.index_type = torch.int64

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Layout:
        """Return itself: it never changes."""
        return self

    def _key(self, shard: Shard) -> RowClass:
        return RowClass(shard.width, self.tables[shard.table].is_weighted)

    def _units(self) -> tuple[Unit, ...]:
        slots = [0] * len(self.classes)
        found: dict[tuple[int, tuple[int, int]], Unit] = {}
        for shard, number in zip(self.shards, self.class_of, strict=True):
            key = shard.table, shard.columns
            if key not in found:
                found[key] = Unit(*key, number, slots[number])
                slots[number] += 1
        return tuple(found.values())

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Units of each class."""
        classes = [unit.row_class for unit in self.units]
        return tuple(classes.count(number) for number in range(len(self.classes)))

    @cached_property
    def units_of_table(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of each table, by columns."""
        return tuple(
            tuple(
                sorted(
                    (unit for unit in self.units if unit.table == number),
                    key=lambda unit: unit.columns,
                )
            )
            for number in range(len(self.tables))
        )

    def own(self, rank: int) -> list[tuple[Shard, RowClass, int]]:
        """Return a rank's shards, their classes, and the rows where they begin."""
        return [
            (shard, self.classes[number], base)
            for shard, number, base in zip(
                self.shards, self.class_of, self.bases, strict=True
            )
            if shard.rank == rank
        ]

    def on(self, device: torch.device) -> Addresses:
        """Return the numbers that turn indices into addresses, on a device."""
        found = self._addresses.get(device)
        if found is None:
            found = self._addresses[device] = Addresses.of(self, device)
        return found

    @cached_property
    def _addresses(self) -> dict[torch.device, Addresses]:
        return {}


class Addresses(NamedTuple):
    """Numbers that turn an index into the row of a rank's parameter.

    A *virtual row* is an index plus the rows of all units before its own. All tensors
    are int64.
    """

    first: Tensor
    """(units,): the first virtual row of each unit."""
    sizes: Tensor
    """(units,): its rows."""
    padding: Tensor | None
    """(units,): its padding row, or -1; None: no table has one."""
    starts: Tensor
    """(shards,): the first virtual row of each shard, in the order of units."""
    shifts: Tensor
    """(shards,): add it to a virtual row, and get the row of the parameter."""
    positions: Tensor
    """(shards,): the place of each shard in the order of messages."""
    slots: Tensor
    """By place in the order of messages: the slot of its unit."""
    row_classes: Tensor
    """By place in the order of messages: the number of its class."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Addresses:
        """Return the addresses of a layout."""
        tables, shards = layout.tables, layout.shards
        sizes = [tables[unit.table].num_embeddings for unit in layout.units]
        first = [sum(sizes[:number]) for number in range(len(sizes))]
        padding = [tables[unit.table].padding_idx for unit in layout.units]
        unit_of = {
            (unit.table, unit.columns): number
            for number, unit in enumerate(layout.units)
        }
        numbers = [unit_of[shard.table, shard.columns] for shard in shards]
        # A shard without rows comes before the one that has the rows from there on.
        order = sorted(
            range(len(shards)),
            key=lambda at: (numbers[at], shards[at].rows[0], shards[at].rows[1]),
        )
        starts = [first[numbers[at]] + shards[at].rows[0] for at in order]
        shifts = [
            layout.bases[at] - start for at, start in zip(order, starts, strict=True)
        ]

        def held(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        has_padding = any(each is not None for each in padding)
        return cls(
            first=held(first),
            sizes=held(sizes),
            padding=held([-1 if each is None else each for each in padding])
            if has_padding
            else None,
            starts=held(starts),
            shifts=held(shifts),
            positions=held(order),
            slots=held([layout.units[number].slot for number in numbers]),
            row_classes=held([*layout.class_of]),
        )
