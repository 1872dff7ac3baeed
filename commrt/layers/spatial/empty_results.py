# SPDX-License-Identifier: Apache-2.0
"""Results without elements, on ranks whose piece of the output is empty.

Such a rank may own elements that others need. So its result must be derived from its
input: then its backward pass meets that of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["empty_result"]


def empty_result(shape: Sequence[int], *inputs: Any) -> Any:
    """Return an empty tensor; all inputs get a gradient of zeros.

    Args:
        shape: has a 0.
        inputs: tensors, or None. The first one says type and device.
    """
    return _Empty.apply(tuple(shape), *inputs)


class _Empty(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], first: Any, *others: Any) -> Any:
        # Shapes of inputs, not the inputs: their values are not needed.
        ctx.like = [
            None if each is None else (each.shape, each.dtype, each.device)
            for each in (first, *others)
        ]
        return first.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        zeros = [
            None
            if each is None
            else torch.zeros(each[0], dtype=each[1], device=each[2])
            for each in ctx.like
        ]
        return None, *zeros
