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
    lengths: Tensor
    """(samples,), int64; ``Route`` checks their sum."""
    weights: Tensor | None
    """(n,)."""


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
    counts = [len(each.lengths) for each in found]
    for table, count in zip(tables, counts, strict=True):
        if count != counts[0]:
            raise UsageError(
                f"ShardedEmbeddingBags: table {table.name!r} has {count} bags, and "
                f"table {tables[0].name!r} has {counts[0]}; each sample needs one bag "
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
    what = f"ShardedEmbeddingBags: table {table.name!r}"
    bags = given if isinstance(given, Bags) else Bags(given)
    indices, offsets, weights = bags
    _check_integers(what, "indices", indices, like)
    if indices.dim() == 2 and offsets is None:
        samples, length = indices.shape
        lengths = indices.new_full((samples,), length, dtype=torch.int64)
    elif indices.dim() == 1 and offsets is not None:
        _check_integers(what, "offsets", offsets, like)
        if offsets.dim() != 1:
            raise UsageError(
                f"{what}: offsets of shape {tuple(offsets.shape)} must have one "
                f"dimension"
            )
        ends = torch.cat([offsets.long(), offsets.new_full((1,), len(indices)).long()])
        lengths = ends[1:] - ends[:-1]
    else:
        raise UsageError(
            f"{what}: indices of shape {tuple(indices.shape)} "
            f"{'without' if offsets is None else 'with'} offsets; expected (samples, "
            f"length) without offsets, or (n,) with them"
        )
    if (weights is not None) != table.is_weighted:
        raise UsageError(
            f"{what}: weights are {'given' if weights is not None else 'missing'}; the "
            f"table has is_weighted={table.is_weighted}"
        )
    if weights is not None:
        if not isinstance(weights, torch.Tensor) or weights.shape != indices.shape:
            raise UsageError(
                f"{what}: weights={shown(weights)} must be a tensor of the shape of "
                f"the indices, {tuple(indices.shape)}"
            )
        if weights.dtype != like.dtype or weights.device != like.device:
            raise UsageError(
                f"{what}: weights of type {weights.dtype} on {weights.device} meet "
                f"rows of type {like.dtype} on {like.device}; they must be equal"
            )
        weights = weights.reshape(-1)
    return FlatBags(indices.reshape(-1).long(), lengths, weights)


def _check_integers(what: str, name: str, found: Any, like: Tensor) -> None:
    if not isinstance(found, torch.Tensor) or found.dtype not in (
        torch.int64,
        torch.int32,
    ):
        raise UsageError(f"{what}: {name}={shown(found)} must be a tensor of integers")
    if found.device != like.device:
        raise UsageError(
            f"{what}: {name} on {found.device} meet rows on {like.device}; move one of "
            f"them"
        )
