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


def empty_result(shape: Sequence[int], *inputs: Any, fill: float = 0.0) -> Any:
    """Return a tensor that depends on no input; all get a gradient of zeros.

    Args:
        shape: of the result; mostly it has a 0.
        inputs: tensors, or None. The first one says type and device.
        fill: the value of its elements, if it has any.
    """
    return _Empty.apply(tuple(shape), fill, *inputs)


class _Empty(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], fill: float, first: Any, *others: Any
    ) -> Any:
        # Shapes of inputs, not the inputs: their values are not needed.
        ctx.like = [
            None if each is None else (each.shape, each.dtype, each.device)
            for each in (first, *others)
        ]
        return first.new_full(shape, fill)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return None, None, *(each and _zeros(*each) for each in ctx.like)


def _zeros(shape: Any, dtype: Any, device: Any) -> Any:
    return torch.zeros(shape, dtype=dtype, device=device)
