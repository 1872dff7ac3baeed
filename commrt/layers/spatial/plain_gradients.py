# SPDX-License-Identifier: Apache-2.0
"""Gradients of a convolution of one piece, by torch, and their sums over pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["added", "plain_gradients"]


def plain_gradients(
    gradient: Any,
    x: Any,
    weight: Any,
    how: tuple[Sequence[int], Sequence[int], Sequence[int], int],
    for_x: bool,
    for_weight: bool,
) -> tuple[Any, Any]:
    """Return the gradients of the input and of the weight, None where not asked for.

    ``how``: stride, padding, dilation and groups of the convolution.
    """
    stride, padding, dilation, groups = how
    zeros = [0] * len(stride)
    of_x, of_weight, _ = torch.ops.aten.convolution_backward(
        *(gradient, x, weight, None, stride, padding, dilation, False, zeros),
        *(groups, (for_x, for_weight, False)),
    )
    return of_x, of_weight


def added(total: Any | None, more: Any | None) -> Any | None:
    """Return the sum of two gradients, in the first one; None is none."""
    if total is None or more is None:
        return more if total is None else total
    return total.add_(more)
