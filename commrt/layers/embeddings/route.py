# SPDX-License-Identifier: Apache-2.0
"""The way of a rank's bags: which row of which rank each index names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.layers.embeddings.bags import FlatBags
from commrt.layers.embeddings.layout import Addresses, Layout
from commrt.layers.embeddings.sorting import stable_sort

__all__ = ["Counts", "Route", "message_sizes", "weights_sizes"]

Tensor: TypeAlias = torch.Tensor
Counts: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank and class: how many pieces of bags, and how many rows they name."""


class _Lookups(NamedTuple):
    """A rank's lookups, in the order of messages."""

    rows: Tensor
    """(n,): the row of the parameter on the rank that has it."""
    lengths: Tensor
    """(pieces,): the lookups of each piece; none is 0."""
    ids: Tensor | None
    """(pieces,): place of the shard, times the samples, plus the sample; None: all."""
    order: Tensor | None
    """(n,): the place of each lookup in the order of units; None: it is that."""
    kept: Tensor | None
    """(units * samples,): indices of each bag without padding; None: all."""


class Route:
    """Where a rank's bags go, and where their rows come back to; local.

    Args:
        bags: of each table.
        layout: the order of messages.

    Raises UsageError for an index that its table has not, and for wrong offsets.
    """

    def __init__(self, bags: Sequence[FlatBags], layout: Layout) -> None:
        self.layout = layout
        self.num_bags = bags[0].num_bags
        """Samples of this rank."""
        parts = [bags[unit.table] for unit in layout.units]
        indices = torch.cat([part.indices for part in parts])
        lengths = _lengths(parts, self.num_bags)
        numbers = [len(part.indices) for part in parts]
        at = layout.on(indices.device)
        per_unit = torch.tensor(numbers, device=indices.device)
        self._check(indices, lengths, per_unit, bags, at)
        if layout.is_static and at.padding is None:
            found = self._in_order(indices, lengths, parts, per_unit, at)
        else:
            found = self._sorted(indices, lengths, per_unit, at)
        self.counts = self._counts(found, numbers)
        """Pieces and rows that leave."""
        self.message = self._message(found)
        """Integers for each rank: for each class lengths of pieces, then rows. Lengths
        are left out where all are 1."""
        self.targets = self._targets(found, at)
        """For each class the place of each row that comes back, in the order of slots,
        then of samples; None: rows come in this order."""
        self.weights = self._weights(found, parts)
        """The weight of each lookup whose class has some; None: no table has."""
        self._kept = lengths if found.kept is None else found.kept

    def divisor(self, unit: int) -> Tensor:
        """Return the indices of each bag of a unit, at least 1, as (samples, 1)."""
        own = self._kept[unit * self.num_bags : (unit + 1) * self.num_bags]
        return own.clamp(min=1)[:, None]

    def _check(
        self,
        indices: Tensor,
        lengths: Tensor,
        per_unit: Tensor,
        bags: Sequence[FlatBags],
        at: Addresses,
    ) -> None:
        is_wrong = False
        if any(each.lengths is not None for each in bags):
            sums = lengths.view(len(per_unit), self.num_bags).sum(1)
            is_wrong = bool((lengths < 0).any() | (sums != per_unit).any())
        if len(indices) and not is_wrong:
            low, high = indices.aminmax()
            is_wrong = int(low) < 0
            # Seldom is an index large enough for the smallest table to matter.
            if not is_wrong and int(high) >= self.layout.least_rows:
                sizes = torch.repeat_interleave(at.sizes, per_unit)
                is_wrong = bool((indices >= sizes).any())
        if not is_wrong:
            return
        for table, own in zip(self.layout.tables, bags, strict=True):
            what = f"ShardedEmbeddingBags: table {table.name!r}"
            each = own.each_length()
            if bool((each < 0).any()) or int(each.sum()) != len(own.indices):
                raise UsageError(
                    f"{what}: offsets must begin with 0, not fall, and not exceed the "
                    f"{len(own.indices)} indices"
                )
            if len(own.indices):
                low, high = own.indices.aminmax()
                if low < 0 or high >= table.num_embeddings:
                    raise UsageError(
                        f"{what}: the indices {int(low)} to {int(high)} must lie in 0 "
                        f"to {table.num_embeddings - 1}"
                    )

    # -- lookups in the order of messages ----------------------------------------------

    def _in_order(
        self,
        indices: Tensor,
        lengths: Tensor,
        parts: Sequence[FlatBags],
        per_unit: Tensor,
        at: Addresses,
    ) -> _Lookups:
        """Return the lookups where units lie in the order of messages."""
        bases, number = at.first + at.shifts, len(parts[0].indices)
        if all(len(part.indices) == number for part in parts):
            shape = len(parts), number
            rows = (indices.view(shape) + bases[:, None]).view(-1)
        else:
            rows = indices + torch.repeat_interleave(bases, per_unit)
        if all(part.length for part in parts) or bool((lengths > 0).all()):
            return _Lookups(rows, lengths, None, None, None)
        ids = lengths.nonzero().view(-1)
        return _Lookups(rows, lengths[ids], ids, None, None)

    def _sorted(
        self, indices: Tensor, lengths: Tensor, per_unit: Tensor, at: Addresses
    ) -> _Lookups:
        """Return the lookups of tables that are cut by rows, or have padding."""
        units = torch.repeat_interleave(per_unit, output_size=len(indices))
        bag = torch.repeat_interleave(lengths, output_size=len(indices))
        virtual = indices + at.first[units]
        order = kept = None
        if at.padding is not None:
            order = (indices != at.padding[units]).nonzero().view(-1)
            bag, virtual = bag[order], virtual[order]
            kept = torch.bincount(bag, minlength=len(lengths))
        shard = torch.bucketize(virtual, at.starts, right=True) - 1
        rows, place = virtual + at.shifts[shard], at.positions[shard]
        key = place * self.num_bags + bag % max(self.num_bags, 1)
        if not self.layout.is_static:
            _, by_place = stable_sort(place)
            rows, key = rows[by_place], key[by_place]
            order = by_place if order is None else order[by_place]
        ids, pieces = torch.unique_consecutive(key, return_counts=True)
        return _Lookups(rows, pieces, ids, order, kept)

    # -- what leaves -------------------------------------------------------------------

    def _counts(self, found: _Lookups, numbers: Sequence[int]) -> Counts:
        layout = self.layout
        if found.ids is None:
            pieces, rows = [self.num_bags] * len(layout.shards), [*numbers]
        else:
            place = found.ids // max(self.num_bags, 1)
            both = torch.zeros(
                (len(layout.shards), 2), dtype=torch.int64, device=place.device
            )
            ones = torch.ones_like(found.lengths)
            both.index_add_(0, place, torch.stack([ones, found.lengths], 1))
            pieces, rows = both.T.tolist()
        total = [[[0, 0] for _ in layout.classes] for _ in range(layout.num_ranks)]
        for shard, row_class, *two in zip(
            layout.shards, layout.class_of, pieces, rows, strict=True
        ):
            both_of = total[shard.rank][row_class]
            both_of[0] += two[0]
            both_of[1] += two[1]
        return tuple(tuple((p, r) for p, r in classes) for classes in total)

    def _message(self, found: _Lookups) -> Tensor:
        kind = self.layout.index_type
        segments = [each for classes in self.counts for each in classes]
        rows = found.rows.to(kind)
        if all(pieces == number for pieces, number in segments):
            return rows
        lengths = found.lengths.to(kind)
        first_rows = [0, *accumulate(number for _, number in segments)]
        first_pieces = [0, *accumulate(pieces for pieces, _ in segments)]
        parts = []
        for (pieces, number), row, piece in zip(
            segments, first_rows, first_pieces, strict=False
        ):
            if pieces != number:
                parts.append(lengths[piece : piece + pieces])
            parts.append(rows[row : row + number])
        return torch.cat(parts)

    def _targets(self, found: _Lookups, at: Addresses) -> tuple[Tensor | None, ...]:
        number = len(self.layout.classes)
        if found.ids is None:
            return (None,) * number
        place = found.ids // max(self.num_bags, 1)
        targets = found.ids + (at.slots[place] - place) * self.num_bags
        if number == 1:
            return (targets,)
        classes = at.row_classes[place]
        return tuple(targets[classes == each] for each in range(number))

    def _weights(self, found: _Lookups, parts: Sequence[FlatBags]) -> Tensor | None:
        given = [part.weights for part in parts if part.weights is not None]
        if not given:
            return None
        every, weighted = [], []
        for part in parts:
            number = len(part.indices)
            has = part.weights is not None
            every.append(part.weights if has else given[0].new_zeros(number))
            weighted.append(part.indices.new_full((number,), has, dtype=torch.bool))
        whole, is_weighted = torch.cat(every), torch.cat(weighted)
        if found.order is not None:
            whole, is_weighted = whole[found.order], is_weighted[found.order]
        return whole[is_weighted]


def _lengths(parts: Sequence[FlatBags], num_bags: int) -> Tensor:
    """Return the lengths of the bags of all units, (units * samples,)."""
    first = parts[0].length
    if first is not None and all(part.length == first for part in parts):
        return parts[0].indices.new_full((len(parts) * num_bags,), first)
    return torch.cat([part.each_length() for part in parts])


def message_sizes(counts: Counts) -> tuple[int, ...]:
    """Return the integers of the message of each rank."""
    return tuple(
        sum(number + (pieces if pieces != number else 0) for pieces, number in classes)
        for classes in counts
    )


def weights_sizes(counts: Counts, layout: Layout) -> tuple[int, ...]:
    """Return the weights of the message of each rank."""
    return tuple(
        sum(
            number
            for (_, number), row_class in zip(classes, layout.classes, strict=True)
            if row_class.is_weighted
        )
        for classes in counts
    )
