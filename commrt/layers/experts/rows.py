# SPDX-License-Identifier: Apache-2.0
"""Copies of rows: each row goes to several places, and comes back as their sum.

A token has a copy for each rank that has some of its experts, and there one for each of
these experts. The two functions are each other's backward pass. Both read the copies of
a row one after the other, so they add in one order on all devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from commrt.layers.differentiable_once import differentiable_once

__all__ = ["Copies", "collect", "collect_weighted", "spread"]

Tensor: TypeAlias = torch.Tensor

_IN_ONE_PASS = (torch.float32, torch.float64)
"""Types that torch sums bags of rows in; narrower ones it would round less often."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Which row each of n copies is of.

    Args:
        source: (n,), int64: the row of each copy.
        order: (n,), int64: the copies, sorted by their rows, then by their own order.
        first: (rows,), int64: where each row's copies begin in ``order``.
        most: no row has more copies.
    """

    source: Tensor
    order: Tensor
    first: Tensor
    most: int

    @classmethod
    def of(cls, source: Tensor, num_rows: int, most: int) -> Copies:
        """Return the copies of some sources; local.

        Args:
            source: (n,), int64.
            num_rows: the number of rows.
            most: no row has more copies.
        """
        order = torch.argsort(source, stable=True)
        rows = torch.arange(num_rows, device=source.device)
        return cls(source, order, torch.searchsorted(source[order], rows), most)

    @cached_property
    def places(self) -> Tensor:
        """(rows, most), int64: the copies of each row; n where a row has fewer."""
        ordered = self.source[self.order]
        nth = torch.arange(len(ordered), device=ordered.device) - self.first[ordered]
        places = ordered.new_full((len(self.first), self.most), len(ordered))
        places[ordered, nth] = self.order
        return places


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


def collect_weighted(x: Tensor, weights: Tensor, copies: Copies) -> Tensor:
    """Return ``collect(x * weights[:, None], copies)``; differentiable once and local.

    It keeps no product, and its backward pass writes over no more than it has made.

    Args:
        x: (n, d), the copies.
        weights: (n,), of the same type.
        copies: the row of each copy.
    """
    result: Tensor = _CollectWeighted.apply(x, weights, copies)
    return result


def _collected(x: Tensor, copies: Copies) -> Tensor:
    if x.device.type == "cpu" and x.dtype in _IN_ONE_PASS and x.numel():
        # A bag's rows are added in their order, as below, and read once.
        flat = x.reshape(len(x), -1)
        bags = functional.embedding_bag(copies.order, flat, copies.first, mode="sum")
        return bags.view(len(copies.first), *x.shape[1:])
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


class _CollectWeighted(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(x, weights)
        return _collected(x * weights[:, None], copies)

    @staticmethod
    @differentiable_once("a mixture of experts")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        each = gradient.index_select(0, ctx.copies.source)
        of_weights = (each * x).sum(-1) if ctx.needs_input_grad[1] else None
        return each.mul_(weights[:, None]), of_weights, None
