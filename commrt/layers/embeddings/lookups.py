# SPDX-License-Identifier: Apache-2.0
"""Sums of rows of one parameter, and the gradient of its touched rows; local."""

from __future__ import annotations

from typing import TypeAlias

import torch

from commrt.layers.embeddings.sorting import stable_sort

__all__ = ["gradient_of_rows", "sums_of_rows"]

Tensor: TypeAlias = torch.Tensor


def sums_of_rows(
    table: Tensor, rows: Tensor, lengths: Tensor | None, factors: Tensor | None
) -> Tensor:
    """Return the sum of the rows of each bag, added in their order.

    Args:
        table: (rows, width).
        rows: (n,), integers.
        lengths: (bags,): how many of these each bag has; None: one each.
        factors: (n,): what rows are multiplied by; None: nothing.

    A bag without rows is 0.
    """
    table = table.detach()
    if lengths is None and factors is None:
        return table.index_select(0, rows)
    number = len(rows) if lengths is None else len(lengths)
    if len(rows) == 0:
        return table.new_zeros((number, table.shape[1]))
    if lengths is None:
        offsets = torch.arange(number, dtype=rows.dtype, device=rows.device)
    else:
        offsets = (lengths.cumsum(0) - lengths).to(rows.dtype)
    # Mode 0 is the sum.
    found: Tensor = torch.embedding_bag(
        table, rows, offsets, False, 0, False, factors, False
    )[0]
    return found


def gradient_of_rows(
    num_rows: int,
    rows: Tensor,
    lengths: Tensor | None,
    factors: Tensor | None,
    gradients: Tensor,
    *,
    is_sparse: bool,
) -> Tensor:
    """Return the gradient of a table: that of each row is the sum over its bags.

    Args:
        num_rows: rows of the table.
        rows, lengths, factors: as for ``sums_of_rows``.
        gradients: (bags, width).
        is_sparse: True: a COO tensor of the touched rows, each once and in order.
    """
    ordered, order = stable_sort(rows)
    touched, counts = torch.unique_consecutive(ordered, return_counts=True)
    bags = order
    if lengths is not None:
        bags = torch.repeat_interleave(lengths, output_size=len(rows))[order]
    values = sums_of_rows(
        gradients, bags, counts, None if factors is None else factors.detach()[order]
    )
    shape = num_rows, gradients.shape[1]
    if is_sparse:
        return torch.sparse_coo_tensor(
            *(touched[None], values, shape), check_invariants=False, is_coalesced=True
        )
    return gradients.new_zeros(shape).index_copy_(0, touched, values)
