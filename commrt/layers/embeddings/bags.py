# SPDX-License-Identifier: Apache-2.0
"""Bags of indices, as torch's EmbeddingBag takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError, shown
from commrt.layers.embeddings.tables import EmbeddingTable

__all__ = ["Bags", "FlatBags", "flat_bags"]

Tensor: TypeAlias = torch.Tensor

_INTEGERS = (torch.int64, torch.int32)


class Bags(NamedTuple):
    """The indices of one table, a bag for each sample."""

    indices: Tensor
    """(n,) with ``offsets``, or (samples, length) without; int64 or int32."""
    offsets: Tensor | None = None
    """(samples,): where each bag begins, in order; the first one is 0."""
    weights: Tensor | None = None
    """Like ``indices``, of the tables' type; for tables with ``is_weighted``."""


class FlatBags(NamedTuple):
    """Bags in one form."""

    indices: Tensor
    """(n,), int64."""
    num_bags: int
    length: int | None
    """Indices of each bag, where all have as many."""
    lengths: Tensor | None
    """(samples,), int64, where they have not; ``Route`` checks their sum."""
    weights: Tensor | None
    """(n,)."""

    def each_length(self) -> Tensor:
        """Return the lengths of bags, (samples,)."""
        if self.lengths is not None:
            return self.lengths
        return self.indices.new_full((self.num_bags,), self.length)


def flat_bags(
    tables: Sequence[EmbeddingTable],
    given: Mapping[str, Bags | Tensor] | Sequence[Bags | Tensor],
    like: Tensor,
) -> list[FlatBags]:
    """Return the bags of each table, in one form.

    Args:
        tables: all tables.
        given: bags by the table's name, or in the order of tables.
        like: has the device and the type of the tables.

    Raises UsageError for bags that do not fit. It looks at no index.
    """
    ordered = _in_order(tables, given)
    found = [
        _flat(table, each, like) for table, each in zip(tables, ordered, strict=True)
    ]
    first = found[0].num_bags
    for table, each in zip(tables, found, strict=True):
        if each.num_bags != first:
            raise UsageError(
                f"ShardedEmbeddingBags: table {table.name!r} has {each.num_bags} bags, "
                f"and table {tables[0].name!r} has {first}; each sample needs one bag "
                f"of each table, which may be empty"
            )
    return found


def _in_order(tables: Sequence[EmbeddingTable], given: Any) -> list[Any]:
    names = [table.name for table in tables]
    if isinstance(given, Mapping):
        if {*given} != {*names}:
            raise UsageError(
                f"ShardedEmbeddingBags: bags of {shown(sorted(map(str, given)))}; "
                f"expected those of the tables {shown(sorted(names))}"
            )
        return [given[name] for name in names]
    is_tensor = isinstance(given, torch.Tensor | Bags)
    if is_tensor or not isinstance(given, Sequence) or len(given) != len(names):
        raise UsageError(
            f"ShardedEmbeddingBags: bags={shown(given)} must be a list with one entry "
            f"for each of {len(names)} tables, or a mapping from their names"
        )
    return [*given]


def _flat(table: EmbeddingTable, given: Any, like: Tensor) -> FlatBags:
    indices, offsets, weights = given if isinstance(given, Bags) else Bags(given)
    _check_integers(table, "indices", indices, like)
    length = lengths = None
    if indices.dim() == 2 and offsets is None:
        samples, length = indices.shape
    elif indices.dim() == 1 and offsets is not None:
        _check_integers(table, "offsets", offsets, like)
        if offsets.dim() != 1:
            raise UsageError(
                f"{_of(table)}: offsets of shape {tuple(offsets.shape)} must have one "
                f"dimension"
            )
        samples = offsets.shape[0]
        ends = torch.cat([offsets.long(), offsets.new_full((1,), len(indices)).long()])
        lengths = ends[1:] - ends[:-1]
    else:
        raise UsageError(
            f"{_of(table)}: indices of shape {tuple(indices.shape)} "
            f"{'without' if offsets is None else 'with'} offsets; expected (samples, "
            f"length) without offsets, or (n,) with them"
        )
    if (weights is not None) != table.is_weighted:
        raise UsageError(
            f"{_of(table)}: weights are "
            f"{'given' if weights is not None else 'missing'}; the table has "
            f"is_weighted={table.is_weighted}"
        )
    if weights is not None:
        if not isinstance(weights, torch.Tensor) or weights.shape != indices.shape:
            raise UsageError(
                f"{_of(table)}: weights={shown(weights)} must be a tensor of the shape "
                f"of the indices, {tuple(indices.shape)}"
            )
        if weights.dtype != like.dtype or weights.device != like.device:
            raise UsageError(
                f"{_of(table)}: weights of type {weights.dtype} on {weights.device} "
                f"meet rows of type {like.dtype} on {like.device}; they must be equal"
            )
        weights = weights.reshape(-1)
    flat = indices.reshape(-1).long()
    return FlatBags(flat, samples, length, lengths, weights)


def _of(table: EmbeddingTable) -> str:
    return f"ShardedEmbeddingBags: table {table.name!r}"


def _check_integers(table: EmbeddingTable, name: str, found: Any, like: Tensor) -> None:
    if not isinstance(found, torch.Tensor) or found.dtype not in _INTEGERS:
        raise UsageError(
            f"{_of(table)}: {name}={shown(found)} must be a tensor of int64 or int32"
        )
    if found.device != like.device:
        raise UsageError(
            f"{_of(table)}: {name} on {found.device} meet rows on {like.device}; move "
            f"one of them"
        )
