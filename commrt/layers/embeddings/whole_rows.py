# SPDX-License-Identifier: Apache-2.0
"""Whole tables from shards, and shards from whole tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from commrt.layers.embeddings.layout import Layout
from commrt.layers.tensor3d.roles import Along

__all__ = ["cut_rows", "gathered_rows"]

Tensor: TypeAlias = torch.Tensor


def gathered_rows(
    layout: Layout, along: Along, held: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return values of the rows of all tables, by their names; collective.

    Args:
        layout: where each shard lies.
        along: the ranks.
        held: this rank's values of each class: (rows, width), or (rows,) of one number
            a row, which all pieces of columns have.

    Bytes: a ``bcast`` of each shard from the rank that has it; of one number a row only
    from the first piece of columns.
    """
    found: dict[str, Tensor] = {}
    places = {
        shard: (row_class, base)
        for shard, row_class, base in zip(
            layout.shards, layout.class_of, layout.bases, strict=True
        )
    }
    for number, table in enumerate(layout.tables):
        is_row = held[0].dim() == 1
        shape = (table.num_embeddings,) if is_row else _shape(layout, number)
        whole = held[0].new_empty(shape)
        for shard in layout.placement.of_table(number):
            if is_row and shard.columns[0] > 0:
                continue
            row_class, base = places[shard]
            part = whole[slice(*shard.rows)]
            part = part if is_row else part[:, slice(*shard.columns)]
            own = held[row_class]
            if shard.rank == along.place:
                values = own[base : base + shard.num_rows].contiguous()
            else:
                values = own.new_empty(part.shape)
            if along.comm is not None and values.numel():
                along.comm.bcast(values, root=shard.rank)
            part.copy_(values)
        found[table.name] = whole
    return found


def cut_rows(
    layout: Layout, place: int, wholes: Mapping[str, Tensor], held: Sequence[Tensor]
) -> None:
    """Put this rank's rows of whole (rows,) values into those of each class; local."""
    numbers = {each: number for number, each in enumerate(layout.classes)}
    for shard, row_class, base in layout.own(place):
        given = wholes[layout.tables[shard.table].name]
        part = held[numbers[row_class]][base : base + shard.num_rows]
        part.copy_(given[slice(*shard.rows)])


def _shape(layout: Layout, number: int) -> tuple[int, int]:
    table = layout.tables[number]
    return table.num_embeddings, table.embedding_dim
