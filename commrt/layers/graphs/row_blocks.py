# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows that ranks of a communicator gather, and scatter sums of.

Rows are cut as ``Placement((axis, other), ...)`` cuts them: the pieces along ``other``
of this rank's block along ``axis``. All of them together are the block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator

__all__ = [
    "gathered_rows",
    "nested_sizes",
    "scattered_rows",
    "start_gathered_rows",
    "start_scattered_rows",
]

Tensor: TypeAlias = torch.Tensor


def nested_sizes(extent: int, outer: int, place: int, inner: int) -> tuple[int, ...]:
    """Return the rows of each rank along the inner axis, of one block along the outer.

    Args:
        extent: rows of the whole.
        outer: ranks along the outer axis.
        place: the block's number along it.
        inner: ranks along the inner axis.
    """
    pieces = outer * inner
    ends = [(place * inner + number) * extent // pieces for number in range(inner + 1)]
    return tuple(high - low for low, high in pairwise(ends))


def start_gathered_rows(
    x: Tensor, comm: Communicator, sizes: tuple[int, ...]
) -> tuple[Tensor, Any]:
    """Start to gather the pieces of a block; return it and the request, or None."""
    if comm.size == 1:
        return x.detach(), None
    x = x.detach().contiguous()
    out = x.new_empty((sum(sizes), x.shape[1]))
    if out.numel() == 0:
        return out, None
    counts = tuple(size * x.shape[1] for size in sizes)
    request = comm.allgatherv(
        x.view(-1), counts=counts, out=out.view(-1), nonblocking=True
    )
    return out, request


def gathered_rows(x: Tensor, comm: Communicator, sizes: tuple[int, ...]) -> Tensor:
    """Return the block of which ranks have pieces. Bytes: allgatherv of the block."""
    out, request = start_gathered_rows(x, comm, sizes)
    if request is not None:
        request.wait()
    return out


def start_scattered_rows(
    x: Tensor, comm: Communicator, sizes: tuple[int, ...]
) -> tuple[Tensor, Any]:
    """Start to sum a block over ranks, each of which gets its piece of the sum.

    Bytes: reduce_scatterv of the block.
    """
    if comm.size == 1:
        return x, None
    out = x.new_empty((sizes[comm.rank], x.shape[1]))
    if x.numel() == 0:
        return out, None
    counts = tuple(size * x.shape[1] for size in sizes)
    request = comm.reduce_scatterv(
        x.contiguous().view(-1), counts=counts, out=out.view(-1), nonblocking=True
    )
    return out, request


def scattered_rows(x: Tensor, comm: Communicator, sizes: tuple[int, ...]) -> Tensor:
    """Return this rank's piece of the sum of a block over ranks."""
    out, request = start_scattered_rows(x, comm, sizes)
    if request is not None:
        request.wait()
    return out
