# SPDX-License-Identifier: Apache-2.0
"""Chooses places for tables: within the ranks' memory, and with even loads.

A table lies whole on one rank as long as that is good, since this takes the fewest
messages. Whole tables go to ranks by longest processing time first: the table with the
largest load goes to the rank that has the least so far (Graham, "Bounds on
multiprocessing timing anomalies", 1969). Then tables change places as long as that
lowers the largest load. A table that no rank has room for is cut by its rows, evenly
over all ranks. So are tables whose load alone is too much for one rank: ``place`` cuts
the heaviest table, then the next one, and keeps a cut that pays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from commrt.errors import UsageError, shown
from commrt.layers.embeddings.placement import Placement, Shard, load_of
from commrt.layers.embeddings.tables import EmbeddingTable, checked_tables
from commrt.layers.spatial.windows import even_ranges

__all__ = ["place"]

WORTH = 0.9
"""A cut that is not needed must lower the largest load to this part at most."""

EVEN = 1.001
"""Loads that are this near to the mean are even enough."""


class _Item(NamedTuple):
    """A part of a table that goes to one rank."""

    table: int
    columns: tuple[int, int]
    nbytes: int
    load: float


class _Trial(NamedTuple):
    """A try to place tables."""

    shards: tuple[Shard, ...]
    loads: tuple[float, ...]
    misfit: int | None
    """A table that no rank has room for; None: all have found one."""


def place(
    tables: Sequence[EmbeddingTable],
    num_ranks: int,
    *,
    limit_nbytes: int | None = None,
    itemsize: int = 4,
) -> Placement:
    """Return where tables should lie; the same on all ranks, local.

    Args:
        tables: a table's ``sharding`` is kept; those with None are whole, or cut by
            rows.
        num_ranks: ranks that can have tables.
        limit_nbytes: bytes of tables that a rank has room for; None: no limit.
            Gradients and an optimizer's state come on top.
        itemsize: bytes of an element.

    Raises UsageError where the tables do not fit.
    """
    tables = checked_tables("place", tables)
    for name, number in (("num_ranks", num_ranks), ("itemsize", itemsize)):
        if type(number) is not int or number < 1:
            raise UsageError(f"place: {name}={shown(number)} must be an integer from 1")
    if limit_nbytes is not None and (type(limit_nbytes) is not int or limit_nbytes < 0):
        raise UsageError(
            f"place: limit_nbytes={shown(limit_nbytes)} must be None or an integer of "
            f"at least 0"
        )
    planner = _Planner(tables, num_ranks, limit_nbytes, itemsize)
    return planner.best()


class _Planner:
    """Tries placements of some tables."""

    def __init__(
        self,
        tables: tuple[EmbeddingTable, ...],
        num_ranks: int,
        limit_nbytes: int | None,
        itemsize: int,
    ) -> None:
        self.tables, self.num_ranks = tables, num_ranks
        self.limit_nbytes, self.itemsize = limit_nbytes, itemsize
        self.reasons: dict[int, str] = {
            number: f"asked for: {table.sharding}"
            for number, table in enumerate(tables)
            if table.sharding is not None
        }
        self.forced = {n for n, table in enumerate(tables) if table.sharding == "row"}

    def best(self) -> Placement:
        """Return the placement with the least largest load among those tried."""
        cut = {*self.forced}
        trial = self.trial(cut)
        while trial.misfit is not None:
            victim = self._to_cut(cut, trial.misfit)
            if victim is None:
                raise self._too_large(trial.misfit)
            cut.add(victim)
            self.reasons[victim] = "cut: no rank has room for it beside the others"
            trial = self.trial(cut)
        found, more = trial, {*cut}
        heavy: list[int] = []
        # No more than one table for each rank has more than the mean load.
        for _ in range(self.num_ranks if self.num_ranks > 1 else 0):
            free = self._free(more)
            if not free:
                break
            heavy.append(max(free, key=lambda n: (self._whole(n).load, -n)))
            more.add(heavy[-1])
            other = self.trial(more)
            if other.misfit is None and max(other.loads) <= WORTH * max(found.loads):
                found = other
                for number in heavy:
                    self.reasons[number] = "cut: whole it would load one rank too much"
                heavy = []
        reasons = tuple(
            self.reasons.get(number, "whole: fits on one rank")
            for number in range(len(self.tables))
        )
        return Placement(
            self.tables, self.num_ranks, found.shards, self.itemsize, reasons
        )

    def _free(self, cut: Collection[int]) -> list[int]:
        """Return the tables that may be cut, and are not."""
        return [
            number
            for number, table in enumerate(self.tables)
            if table.sharding is None and number not in cut
        ]

    def _to_cut(self, cut: Collection[int], misfit: int) -> int | None:
        """Return the table to cut next, where one has found no room."""
        free = self._free(cut)
        if misfit in free:
            return misfit
        return max(free, key=lambda n: (self._whole(n).nbytes, -n), default=None)

    def _too_large(self, misfit: int) -> UsageError:
        nbytes = [table.nbytes(self.itemsize) for table in self.tables]
        table = self.tables[misfit]
        return UsageError(
            f"place: the tables do not fit: they have {sum(nbytes)} bytes, and "
            f"{self.num_ranks} ranks have room for {self.limit_nbytes} each; table "
            f"{table.name!r} of {nbytes[misfit]} bytes, sharding={table.sharding!r}, "
            f"found no place. Raise limit_nbytes, take more ranks, or leave sharding "
            f"to place (None)"
        )

    # -- one try -----------------------------------------------------------------------

    def trial(self, cut: Collection[int]) -> _Trial:
        """Place all tables, those of ``cut`` by rows over all ranks."""
        by_load = self._packed(cut, lambda item: (-item.load, -item.nbytes))
        if by_load.misfit is None:
            return by_load
        # Large ones first leave fewer gaps.
        by_size = self._packed(cut, lambda item: (-item.nbytes, -item.load))
        return by_load if by_size.misfit is not None else by_size

    def _packed(
        self, cut: Collection[int], first: Callable[[_Item], tuple[float, ...]]
    ) -> _Trial:
        nbytes, loads = [0] * self.num_ranks, [0.0] * self.num_ranks
        shards = []
        for number in sorted(cut):
            for shard in self._by_rows(number):
                shards.append(shard)
                nbytes[shard.rank] += shard.num_rows * shard.width * self.itemsize
                table = self.tables[number]
                loads[shard.rank] += load_of(table, shard, self.itemsize)
        limit = self.limit_nbytes
        if limit is not None and shards and max(nbytes) > limit:
            largest = max(cut, key=lambda n: (self.tables[n].nbytes(1), -n))
            return _Trial((), (), largest)
        held: list[list[_Item]] = [[] for _ in range(self.num_ranks)]
        for item in sorted(self._items(cut), key=lambda each: (*first(each), *each)):
            ranks = [
                rank
                for rank in range(self.num_ranks)
                if (limit is None or nbytes[rank] + item.nbytes <= limit)
                and _may_have(held[rank], item)
            ]
            if not ranks:
                return _Trial((), (), item.table)
            rank = min(ranks, key=lambda r: (loads[r], nbytes[r], r))
            held[rank].append(item)
            loads[rank] += item.load
            nbytes[rank] += item.nbytes
        self._improve(held, loads, nbytes)
        for rank, items in enumerate(held):
            for item in items:
                rows = 0, self.tables[item.table].num_embeddings
                shards.append(Shard(item.table, rank, rows, item.columns))
        return _Trial(tuple(sorted(shards)), tuple(loads), None)

    def _improve(
        self, held: list[list[_Item]], loads: list[float], nbytes: list[int]
    ) -> None:
        """Move or swap items as long as that lowers the largest load."""
        mean = sum(loads) / self.num_ranks
        for _ in range(4 * sum(map(len, held))):
            worst = max(range(self.num_ranks), key=lambda r: (loads[r], -r))
            if loads[worst] <= mean * EVEN:
                return
            best: tuple[float, int, _Item, _Item | None] | None = None
            for rank in range(self.num_ranks):
                pairs = itertools.product(held[worst], (None, *held[rank]))
                for item, back in pairs if rank != worst else ():
                    less = item.load - (back.load if back else 0.0)
                    after = max(loads[worst] - less, loads[rank] + less)
                    most = loads[worst] * (1 - 1e-9) if best is None else best[0]
                    if after < most and self._fits(
                        (held[worst], nbytes[worst], item),
                        (held[rank], nbytes[rank], back),
                    ):
                        best = after, rank, item, back
            if best is None:
                return
            _, rank, item, back = best
            for source, target, each in ((worst, rank, item), (rank, worst, back)):
                if each is not None:
                    held[source].remove(each)
                    held[target].append(each)
                    loads[source] -= each.load
                    loads[target] += each.load
                    nbytes[source] -= each.nbytes
                    nbytes[target] += each.nbytes

    def _fits(
        self,
        one: tuple[list[_Item], int, _Item],
        other: tuple[list[_Item], int, _Item | None],
    ) -> bool:
        """Return whether two ranks may change an item for another one, or for none."""
        for (held, nbytes, gone), (_, _, new) in ((one, other), (other, one)):
            if new is None:
                continue
            after = nbytes + new.nbytes - (gone.nbytes if gone else 0)
            if self.limit_nbytes is not None and after > self.limit_nbytes:
                return False
            if not _may_have([each for each in held if each is not gone], new):
                return False
        return True

    # -- parts of tables ---------------------------------------------------------------

    def _by_rows(self, number: int) -> list[Shard]:
        table = self.tables[number]
        columns = 0, table.embedding_dim
        ranges = even_ranges(table.num_embeddings, self.num_ranks)
        return [Shard(number, rank, rows, columns) for rank, rows in enumerate(ranges)]

    def _items(self, cut: Collection[int]) -> list[_Item]:
        """Return the parts that each go to one rank."""
        found = []
        for number, table in enumerate(self.tables):
            if number in cut:
                continue
            pieces = 1
            if table.sharding == "column":
                pieces = min(self.num_ranks, table.embedding_dim)
            for columns in even_ranges(table.embedding_dim, pieces):
                found.append(self._item(number, columns))
        return found

    def _whole(self, number: int) -> _Item:
        return self._item(number, (0, self.tables[number].embedding_dim))

    def _item(self, number: int, columns: tuple[int, int]) -> _Item:
        table = self.tables[number]
        shard = Shard(number, 0, (0, table.num_embeddings), columns)
        nbytes = shard.num_rows * shard.width * self.itemsize
        return _Item(number, columns, nbytes, load_of(table, shard, self.itemsize))


def _may_have(held: Sequence[_Item], item: _Item) -> bool:
    """Return whether a rank has no other part of the item's table."""
    return all(each.table != item.table for each in held)
