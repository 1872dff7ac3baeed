# SPDX-License-Identifier: Apache-2.0
"""Values that blocks hand on: a tensor, or a tuple of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError, shown

__all__ = ["mapped", "tensors_of"]

Tensor: TypeAlias = torch.Tensor


def tensors_of(value: Any, what: str) -> tuple[Tensor, ...]:
    """Return the tensors of a value; UsageError for other values."""
    parts = value if isinstance(value, tuple) else (value,)
    wrong = [part for part in parts if not isinstance(part, torch.Tensor)]
    if wrong or not parts:
        raise UsageError(
            f"OutOfCore: {what} is {shown((wrong or [value])[0])}; blocks take and "
            f"return a tensor, or a tuple of tensors, one at least"
        )
    return parts


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with each tensor changed."""
    if isinstance(value, tuple):
        return tuple(change(part) for part in value)
    return change(value)
