# SPDX-License-Identifier: Apache-2.0
"""The way of a rank's bags: which row of which rank each index names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from commrt.errors import UsageError
from commrt.layers.embeddings.bags import FlatBags
from commrt.layers.embeddings.layout import Addresses, Layout

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
        self.num_bags = len(bags[0].lengths)
        """Samples of this rank."""
        parts = [bags[unit.table] for unit in layout.units]
        indices = torch.cat([part.indices for part in parts])
        lengths = torch.cat([part.lengths for part in parts])
        device = indices.device
        numbers = [len(part.indices) for part in parts]
        at = layout.on(device)
        per_unit = torch.tensor(numbers, device=device)
        units = torch.repeat_interleave(per_unit, output_size=len(indices))
        self._check(indices, lengths, at.sizes[units], per_unit, bags)
        if layout.is_static and at.padding is None:
            found = self._in_order(indices, lengths, units, at)
        else:
            found = self._sorted(indices, lengths, units, at)
        self.counts = self._counts(found, numbers)
        """Of what leaves."""
        self.message = self._message(found)
        """What each rank gets: for each class lengths of pieces, then rows. Lengths
        are left out where all are 1."""
        self.targets = self._targets(found, at)
        """For each class the place of each row that comes back, in the order of slots,
        then of samples; None: rows come in this order."""
        self.weights = self._weights(found, parts, units)
        """Of each lookup whose class has weights; None: no table has."""
        self._kept = lengths if found.kept is None else found.kept

    def divisor(self, unit: int) -> Tensor:
        """Return the indices of each bag of a unit, at least 1, as (samples, 1)."""
        own = self._kept[unit * self.num_bags : (unit + 1) * self.num_bags]
        return own.clamp(min=1)[:, None]

    def _check(
        self,
        indices: Tensor,
        lengths: Tensor,
        sizes: Tensor,
        per_unit: Tensor,
        bags: Sequence[FlatBags],
    ) -> None:
        sums = lengths.view(len(per_unit), self.num_bags).sum(1)
        wrong = ((indices < 0) | (indices >= sizes)).any()
        wrong |= (lengths < 0).any() | (sums != per_unit).any()
        if not bool(wrong):
            return
        for table, own in zip(self.layout.tables, bags, strict=True):
            what = f"ShardedEmbeddingBags: table {table.name!r}"
            if bool((own.lengths < 0).any()) or int(own.lengths.sum()) != len(
                own.indices
            ):
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
        self, indices: Tensor, lengths: Tensor, units: Tensor, at: Addresses
    ) -> _Lookups:
        """Return the lookups where units lie in the order of messages."""
        rows = indices + (at.first + at.shifts)[units]
        if bool((lengths > 0).all()):
            return _Lookups(rows, lengths, None, None, None)
        ids = lengths.nonzero().view(-1)
        return _Lookups(rows, lengths[ids], ids, None, None)

    def _sorted(
        self, indices: Tensor, lengths: Tensor, units: Tensor, at: Addresses
    ) -> _Lookups:
        """Return the lookups of tables that are cut by rows, or have padding."""
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
            by_place = torch.argsort(place, stable=True)
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
        total = np.zeros((layout.num_ranks, len(layout.classes), 2), np.int64)
        for shard, row_class, *two in zip(
            layout.shards, layout.class_of, pieces, rows, strict=True
        ):
            total[shard.rank, row_class] += two
        return tuple(
            tuple((int(p), int(r)) for p, r in classes) for classes in total.tolist()
        )

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

    def _weights(
        self,
        found: _Lookups,
        parts: Sequence[FlatBags],
        units: Tensor,
    ) -> Tensor | None:
        given = [part.weights for part in parts if part.weights is not None]
        if not given:
            return None
        layout, first = self.layout, given[0]
        weights = torch.cat(
            [
                first.new_zeros(len(part.indices))
                if part.weights is None
                else part.weights
                for part in parts
            ]
        )
        weighted = torch.tensor(
            [layout.classes[unit.row_class].is_weighted for unit in layout.units],
            device=units.device,
        )
        order = found.order
        if order is None:
            order = torch.arange(len(units), device=units.device)
        return weights[order[weighted[units[order]]]]


def message_sizes(counts: Counts) -> tuple[int, ...]:
    """Return the integers of the message of each rank."""
    return tuple(
        sum(
            number + (pieces if pieces != number else 0) for pieces, number in classes
        )
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
