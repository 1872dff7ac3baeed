# SPDX-License-Identifier: Apache-2.0
"""Means of squares over whole rows, of which ranks have pieces of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.embeddings.layout import Layout
from commrt.layers.embeddings.placement import Shard
from commrt.layers.tensor3d.roles import Along

__all__ = ["ClassColumns", "ColumnSums"]

Tensor: TypeAlias = torch.Tensor


class ClassColumns(NamedTuple):
    """A parameter's note: which class of a layer it has the rows of."""

    sums: ColumnSums
    number: int


class _Piece(NamedTuple):
    """A piece of columns on this rank."""

    shard: Shard
    row_class: int
    base: int
    owners: tuple[Shard, ...]
    """All pieces of the table, by columns."""


class ColumnSums:
    """Sums over the pieces of rows that lie on different ranks.

    All pieces of a row are looked up together, so their ranks touch the same rows. A
    rank may have frozen its piece, so ranks compare numbers of rows first.

    Args:
        layout: where each shard lies.
        along: the ranks.
    """

    def __init__(self, layout: Layout, along: Along) -> None:
        self._layout, self._along = layout, along
        placement = layout.placement
        cut = {
            number
            for number in range(len(layout.tables))
            if placement.sharding_of(number) == "column"
        }
        pieces = sorted(s for s in layout.shards if s.table in cut)
        self._cut = {shard: number for number, shard in enumerate(pieces)}
        """All pieces, of all ranks, and their numbers."""
        self._is_needed = bool(cut) and along.comm is not None
        numbers = {each: number for number, each in enumerate(layout.classes)}
        self._pieces = tuple(
            _Piece(shard, numbers[each], base, placement.of_table(shard.table))
            for shard, each, base in sorted(layout.own(along.place))
            if shard.table in cut
        )

    def __deepcopy__(self, memo: Mapping[int, Any]) -> ColumnSums:
        """Return another one: an optimizer may have both layers' parameters."""
        return ColumnSums(self._layout, self._along)

    def of_class(self, number: int) -> ClassColumns:
        """Return the note of a class's parameter."""
        return ClassColumns(self, number)

    def means(
        self, touched: Mapping[int, tuple[Tensor, Tensor]], like: Tensor
    ) -> dict[int, Tensor]:
        """Return the mean over each whole row, by class; collective.

        Args:
            touched: by class, the touched rows of its parameter, in order, and the sum
                over this rank's columns of each. A class may be missing.
            like: has the type and the device of sums.

        Pattern, where tables are cut by columns: an ``allreduce`` of 8 bytes for each
        piece of all ranks, and an ``alltoallv`` if any row is touched. A rank sends to
        each other owner of pieces one element for each touched row. All owners add in
        the order of columns, and get the same bits.

        Raises UsageError on all ranks where pieces of a table have different numbers of
        touched rows, or only some have a gradient.
        """
        means = {
            number: sums / self._layout.classes[number].width
            for number, (_, sums) in touched.items()
        }
        if not self._is_needed:
            return means
        comm, place = self._along.comm, self._along.place
        assert comm is not None
        spans = [self._span(piece, touched) for piece in self._pieces]
        if not self._are_any_touched(comm, spans):
            return means
        counts = [0] * comm.size
        leaving: list[list[Tensor]] = [[] for _ in counts]
        for piece, (low, high) in zip(self._pieces, spans, strict=True):
            for owner in piece.owners:
                if owner.rank != place and high > low:
                    counts[owner.rank] += high - low
                    leaving[owner.rank].append(touched[piece.row_class][1][low:high])
        flat = [part for parts in leaving for part in parts]
        sent = torch.cat(flat) if flat else like.new_empty(0)
        coming = torch.empty_like(sent)
        comm.alltoallv(sent, send_counts=counts, recv_counts=counts, out=coming)
        from_rank = [*coming.split(counts)]
        for piece, (low, high) in zip(self._pieces, spans, strict=True):
            if high <= low:
                continue
            total = torch.zeros_like(touched[piece.row_class][1][low:high])
            for owner in piece.owners:
                if owner.rank == place:
                    total += touched[piece.row_class][1][low:high]
                else:
                    part, rest = from_rank[owner.rank].tensor_split([high - low])
                    from_rank[owner.rank] = rest
                    total += part
            columns = self._layout.tables[piece.shard.table].embedding_dim
            means[piece.row_class][low:high] = total / columns
        return means

    def _span(
        self, piece: _Piece, touched: Mapping[int, tuple[Tensor, Tensor]]
    ) -> tuple[int, int]:
        """Return where the piece's rows lie among the touched ones of its class.

        (1, 0): the class is missing.
        """
        if piece.row_class not in touched:
            return 1, 0
        rows = touched[piece.row_class][0]
        ends = rows.new_tensor([piece.base, piece.base + piece.shard.num_rows])
        low, high = torch.searchsorted(rows, ends).tolist()
        return low, high

    def _are_any_touched(
        self, comm: Communicator, spans: Sequence[tuple[int, int]]
    ) -> bool:
        """Return whether any rank has touched rows; UsageError where pieces differ."""
        numbers = np.zeros(len(self._cut), np.int64)
        for piece, (low, high) in zip(self._pieces, spans, strict=True):
            numbers[self._cut[piece.shard]] = high - low
        comm.allreduce(numbers)
        # Each piece is one rank's, so its sum is the number that this rank has.
        found: dict[int, dict[int, int]] = {}
        for shard, number in zip(self._cut, numbers.tolist(), strict=True):
            found.setdefault(shard.table, {})[shard.rank] = number
        for table, by_rank in found.items():
            if len({*by_rank.values()}) > 1:
                told = ", ".join(
                    f"rank {rank}: {'no gradient' if number < 0 else f'{number} rows'}"
                    for rank, number in sorted(by_rank.items())
                )
                name = self._layout.tables[table].name
                raise UsageError(
                    f"RowwiseAdagrad.step: table {name!r} is cut by columns, and its "
                    f"pieces have gradients of different rows ({told}), so no rank "
                    f"changes a row. Freeze the table on all ranks or on none, and "
                    f"give all parameters of the layer to one optimizer"
                )
        return bool((numbers > 0).any())
