# SPDX-License-Identifier: Apache-2.0
"""First values of a table's shard, the same for every placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commrt.layers.embeddings.placement import Shard
from commrt.layers.embeddings.tables import EmbeddingTable

__all__ = ["first_values"]

Tensor: TypeAlias = torch.Tensor

BLOCK_ROWS = 1024
"""Rows that are drawn together: a rank draws the blocks that its shard meets."""
_MOST_BLOCKS = 2**20


def first_values(
    tables: Sequence[EmbeddingTable], shard: Shard, seed: int, dtype: Any
) -> Tensor:
    """Return (rows, width) of a normal distribution, on the host; a padding row is 0.

    Args:
        tables: all tables.
        shard: a part of one of them.
        seed: the same on all ranks.
        dtype: of the values.
    """
    table = tables[shard.table]
    low, high = shard.rows
    found = torch.empty((high - low, shard.width), dtype=dtype, device="cpu")
    for block in range(low // BLOCK_ROWS, -(-high // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        last = min(first + BLOCK_ROWS, table.num_embeddings)
        number = shard.table * _MOST_BLOCKS + block
        draws = torch.Generator("cpu").manual_seed((seed + number) % 2**63)
        shape = last - first, table.embedding_dim
        values = torch.randn(shape, generator=draws, dtype=dtype, device="cpu")
        values *= table.init_std
        here = slice(max(first, low), min(last, high))
        found[here.start - low : here.stop - low] = values[
            here.start - first : here.stop - first, slice(*shard.columns)
        ]
    padding = table.padding_idx
    if padding is not None and low <= padding < high:
        found[padding - low] = 0
    return found
