# SPDX-License-Identifier: Apache-2.0
"""Cholesky factors of stacks of matrices, and their inverses.

numpy solves no triangular systems. The inverse of ((A, 0), (C, D)) is
((A^-1, 0), (-D^-1 C A^-1, D^-1)), so nearly all work is products of stacks. Source:
Higham, "Accuracy and stability of numerical algorithms", section 14.2.
"""

from __future__ import annotations

import numpy as np

from commrt.science.rows import Floats

__all__ = ["cholesky", "inverse_of_lower"]

_SMALL = 8
"""Rows from which on halves pay."""


def cholesky(matrices: Floats) -> Floats | None:
    """Return the lower Cholesky factors of symmetric matrices, (..., n, n).

    None where one of them is not positive definite, or has NaN.
    """
    try:
        lower: Floats = np.asarray(np.linalg.cholesky(matrices), np.float64)
    except np.linalg.LinAlgError:
        return None
    return lower


def inverse_of_lower(lower: Floats) -> Floats:
    """Return the inverses of lower triangular matrices, (..., n, n).

    Elements above the diagonal are not looked at. The diagonal has no 0.
    """
    out = np.zeros(lower.shape)
    _invert(lower, out)
    return out


def _invert(lower: Floats, out: Floats) -> None:
    size = lower.shape[-1]
    if size <= _SMALL:
        _invert_small(lower, out)
        return
    half = size // 2
    _invert(lower[..., :half, :half], out[..., :half, :half])
    _invert(lower[..., half:, half:], out[..., half:, half:])
    first, last = out[..., :half, :half], out[..., half:, half:]
    out[..., half:, :half] = -(last @ (lower[..., half:, :half] @ first))


def _invert_small(lower: Floats, out: Floats) -> None:
    """Substitute row by row."""
    for row in range(lower.shape[-1]):
        pivot = lower[..., row, row]
        out[..., row, row] = 1.0 / pivot
        for column in range(row):
            known = lower[..., row, column:row] * out[..., column:row, column]
            out[..., row, column] = -known.sum(-1) / pivot
