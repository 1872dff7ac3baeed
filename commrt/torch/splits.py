# SPDX-License-Identifier: Apache-2.0
"""Split sizes of ``all_to_all_single``: torch's rows, and commrt's elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from commrt._native import has_memory
from commrt.torch.errors import wrong_call

__all__ = ["checked_counts", "in_elements"]


def in_elements(tensor: torch.Tensor, splits: Any) -> Any:
    """Return splits that are counted in rows, counted in elements; nothing is checked.

    None where they are neither a list nor an array of numpy, and where the tensor is
    not a plain one, or has no rows.
    """
    if not has_memory(tensor):  # some without cannot even say their shape
        return None
    shape = tensor.shape
    if len(shape) == 1:
        return splits if type(splits) in (list, np.ndarray) else None
    if not shape or not shape[0]:
        return None
    row = math.prod(shape[1:])
    if type(splits) is np.ndarray:
        return splits * row
    if type(splits) is list and all(type(each) is int for each in splits):
        return [each * row for each in splits]
    return None


def checked_counts(
    what: str, splits: Any, tensor: torch.Tensor, flat: torch.Tensor, size: int
) -> list[int]:
    """Return elements per rank from rows per rank; equal ones where none are given."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None or not len(splits):
        if rows % size:
            raise wrong_call(
                f"all_to_all_single: {what} has {rows} rows, which cannot be divided "
                f"by {size} ranks: give split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise wrong_call(
            f"all_to_all_single: {what} split sizes {list(splits)} must be {size} "
            f"numbers that add up to its {rows} rows"
        )
    row = flat.numel() // rows if rows else 0
    return [int(split) * row for split in splits]
