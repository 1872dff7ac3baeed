# SPDX-License-Identifier: Apache-2.0
"""Copies of rows: each row goes to several places, and comes back as their sum.

A token has a copy for each rank that has some of its experts, and there one for each of
these experts. The two functions are each other's backward pass. Both gather, so they
add in one order on all devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = ["Copies", "collect", "spread"]

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, eq=False)
class Copies:
    """Which row each of n copies is of.

    Args:
        source: (n,), int64: the row of each copy.
        places: (rows, width), int64: the copies of each row, in their order; n where a
            row has fewer.
    """

    source: Tensor
    places: Tensor

    @classmethod
    def of(cls, source: Tensor, num_rows: int, most: int) -> Copies:
        """Return the copies of some sources; local.

        Args:
            source: (n,), int64.
            num_rows: the number of rows.
            most: no row has more copies.
        """
        order = torch.argsort(source, stable=True)
        ordered = source[order]
        rows = torch.arange(num_rows, device=source.device)
        first = torch.searchsorted(ordered, rows)
        nth = torch.arange(len(source), device=source.device) - first[ordered]
        places = source.new_full((num_rows, most), len(source))
        places[ordered, nth] = order
        return cls(source, places)


def spread(x: Tensor, copies: Copies) -> Tensor:
    """Return the copies (n, d) of rows (rows, d); differentiable and local."""
    result: Tensor = _Spread.apply(x, copies)
    return result


def collect(x: Tensor, copies: Copies) -> Tensor:
    """Return, for each row, the sum of its copies; differentiable and local.

    Args:
        x: (n, d), the copies. They are added in their order.

    Rows without copies are 0.
    """
    result: Tensor = _Collect.apply(x, copies)
    return result


def _collected(x: Tensor, copies: Copies) -> Tensor:
    padded = torch.cat([x, x.new_zeros((1, *x.shape[1:]))])
    first, *others = copies.places.unbind(1)
    total = padded[first]
    for places in others:
        total += padded[places]
    return total


class _Spread(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x.index_select(0, copies.source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Collect.apply(gradient, ctx.copies), None


class _Collect(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return _collected(x, copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(gradient, ctx.copies), None
