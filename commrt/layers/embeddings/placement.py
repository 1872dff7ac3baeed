# SPDX-License-Identifier: Apache-2.0
"""The places of tables on ranks: which rank has which rows and columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from commrt.errors import UsageError, shown
from commrt.layers.embeddings.tables import EmbeddingTable, checked_tables

__all__ = ["Placement", "Shard", "load_of"]


class Shard(NamedTuple):
    """The part of a table that one rank has."""

    table: int
    """The table's number."""
    rank: int
    rows: tuple[int, int]
    """The first row, and the one behind the last."""
    columns: tuple[int, int]
    """The first column, and the one behind the last."""

    @property
    def num_rows(self) -> int:
        """Rows of the part."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """Columns of the part."""
        return self.columns[1] - self.columns[0]


def load_of(table: EmbeddingTable, shard: Shard, itemsize: int) -> float:
    """Return the bytes that a shard's rank reads and sends for a sample, on average.

    Indices are taken to be spread evenly over the rows. A rank reads a row for each
    index, and sends one for each bag that has any.
    """
    share = shard.num_rows / max(table.num_embeddings, 1)
    reads = table.lookups * share
    return (reads + min(reads, 1.0)) * shard.width * itemsize


@dataclass(frozen=True)
class Placement:
    """Where each table lies: whole, or cut by rows or by columns.

        print(place(tables, num_ranks=4).explain())

    ``place`` returns a good one. A program may make one of its own, from shards.

    Args:
        tables: all tables.
        num_ranks: ranks that have shards.
        shards: of all tables. A table's shards tile its rows or its columns, and lie
            on different ranks.
        itemsize: bytes of an element.
        reasons: for each table why it lies so; () without reasons.

    Raises UsageError for shards that do not tile their tables.
    """

    tables: tuple[EmbeddingTable, ...]
    num_ranks: int
    shards: tuple[Shard, ...]
    itemsize: int = 4
    reasons: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        # Programs may give lists, which are equal to no tuple.
        object.__setattr__(self, "tables", checked_tables("Placement", self.tables))
        for name in ("shards", "reasons"):
            given = getattr(self, name)
            if not isinstance(given, list | tuple):
                raise UsageError(f"Placement: {name}={shown(given)} must be a list")
            object.__setattr__(self, name, tuple(given))
        for shard in self.shards:
            if not isinstance(shard, Shard):
                raise UsageError(f"Placement: {shown(shard)} must be a Shard")
            if not 0 <= shard.table < len(self.tables):
                raise UsageError(
                    f"Placement: {shard} is of no table; there are {len(self.tables)}"
                )
            if not 0 <= shard.rank < self.num_ranks:
                raise UsageError(
                    f"Placement: {shard} lies on rank {shard.rank}; expected 0 to "
                    f"{self.num_ranks - 1}"
                )
        for number, table in enumerate(self.tables):
            _check_tiles(table, self.of_table(number))

    def of_table(self, number: int) -> tuple[Shard, ...]:
        """Return the shards of a table, by their first row and column."""
        own = [shard for shard in self.shards if shard.table == number]
        return tuple(sorted(own, key=lambda each: (each.rows, each.columns)))

    def sharding_of(self, number: int) -> str:
        """Return "table", "row" or "column"."""
        shards = self.of_table(number)
        if len(shards) == 1:
            return "table"
        is_whole = shards[0].width == self.tables[number].embedding_dim
        return "row" if is_whole else "column"

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each rank's shards."""
        found = [0] * self.num_ranks
        for shard in self.shards:
            found[shard.rank] += shard.num_rows * shard.width * self.itemsize
        return tuple(found)

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Bytes that each rank reads and sends for a sample, as ``load_of`` counts."""
        found = [0.0] * self.num_ranks
        for shard in self.shards:
            table = self.tables[shard.table]
            found[shard.rank] += load_of(table, shard, self.itemsize)
        return tuple(found)

    @property
    def imbalance(self) -> float:
        """The largest load of a rank over the mean; 1.0 where all are equal."""
        mean = sum(self.loads) / self.num_ranks
        return max(self.loads) / mean if mean else 1.0

    def explain(self) -> str:
        """Return a text with a line for each table and each rank."""
        wide = max(len("table"), *(len(each.name) for each in self.tables))
        lines = [f"{'table':<{wide}}  {'bytes':>12}  {'load':>10}  sharding  ranks"]
        for number, table in enumerate(self.tables):
            shards = self.of_table(number)
            load = sum(load_of(table, each, self.itemsize) for each in shards)
            ranks = ",".join(str(each.rank) for each in shards)
            line = (
                f"{table.name:<{wide}}  {table.nbytes(self.itemsize):>12}  "
                f"{load:>10.1f}  {self.sharding_of(number):<8}  {ranks}"
            )
            lines.append(line + (f"  ({self.reasons[number]})" if self.reasons else ""))
        lines += ["", f"{'rank':>4}  {'bytes':>12}  {'load':>10}  of the mean"]
        mean = sum(self.loads) / self.num_ranks
        for rank, (nbytes, load) in enumerate(
            zip(self.nbytes, self.loads, strict=True)
        ):
            part = load / mean if mean else 1.0
            lines.append(f"{rank:>4}  {nbytes:>12}  {load:>10.1f}  {part:>11.2f}")
        lines += ["", "load: bytes that are read and sent for a sample"]
        return "\n".join(lines)


def _check_tiles(table: EmbeddingTable, shards: Sequence[Shard]) -> None:
    """Raise UsageError unless shards tile a table by rows or by columns."""
    whole_rows = (0, table.num_embeddings)
    whole_columns = (0, table.embedding_dim)
    by_rows = all(shard.columns == whole_columns for shard in shards)
    ends = [shard.rows if by_rows else shard.columns for shard in shards]
    extent = whole_rows[1] if by_rows else whole_columns[1]
    is_tiled = bool(shards) and ends[0][0] == 0 and ends[-1][1] == extent
    is_tiled = is_tiled and all(low <= high for low, high in ends)
    for (_, high), (low, _) in itertools.pairwise(ends):
        is_tiled = is_tiled and low == high
    if not by_rows:
        is_tiled = is_tiled and all(
            shard.rows == whole_rows and shard.width > 0 for shard in shards
        )
    if not is_tiled:
        raise UsageError(
            f"Placement: the shards of table {table.name!r} do not tile its "
            f"{table.num_embeddings} rows, each with all columns, nor its "
            f"{table.embedding_dim} columns, each with all rows: "
            f"{shown([(each.rows, each.columns) for each in shards])}"
        )
    ranks = [shard.rank for shard in shards]
    if len({*ranks}) < len(ranks):
        raise UsageError(
            f"Placement: a rank has two shards of table {table.name!r}: its shards lie "
            f"on the ranks {ranks}; join them, or put them on different ranks"
        )
