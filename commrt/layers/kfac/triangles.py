# SPDX-License-Identifier: Apache-2.0
"""Symmetric matrices as their lower triangles, row by row; local."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

__all__ = ["packed", "packed_length", "side_of", "trace_of", "unpacked"]

Tensor: TypeAlias = torch.Tensor


def packed_length(side: int) -> int:
    """Return the number of elements of a triangle."""
    return side * (side + 1) // 2


def side_of(length: int) -> int:
    """Return the rows of the matrix whose triangle has this many elements."""
    return (math.isqrt(8 * length + 1) - 1) // 2


def _mask(side: int, device: torch.device) -> Tensor:
    return torch.ones(side, side, dtype=torch.bool, device=device).tril_()


def packed(matrix: Tensor) -> Tensor:
    """Return the lower triangle of a matrix (n, n), its diagonal included."""
    return matrix[_mask(matrix.shape[0], matrix.device)]


def unpacked(triangle: Tensor) -> Tensor:
    """Return the symmetric matrix whose lower triangle this is."""
    side = side_of(len(triangle))
    matrix = triangle.new_zeros(side, side)
    matrix[_mask(side, triangle.device)] = triangle
    return matrix + matrix.tril(-1).t()


def trace_of(triangle: Tensor) -> Tensor:
    """Return the sum of the diagonal of a packed matrix, a scalar."""
    rows = torch.arange(1, side_of(len(triangle)) + 1, device=triangle.device)
    return triangle[rows * (rows + 1) // 2 - 1].sum()
