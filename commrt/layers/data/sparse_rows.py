# SPDX-License-Identifier: Apache-2.0
"""Gradients of embeddings: a few rows of a table, as sparse vectors and back."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from commrt.arrays.tensors import is_tensor
from commrt.errors import UsageError
from commrt.sparse.vector import SparseVector

__all__ = ["as_sparse", "dense_rows", "empty_sparse", "scaled", "summed"]

_INT32_MOST = 2**31


def as_sparse(gradient: Any, shape: tuple[int, ...], what: str) -> SparseVector:
    """Return a gradient as a sparse vector of numpy's arrays.

    Accepted: a SparseVector; ``(rows, values)``, where ``values[i]`` belongs to row
    ``rows[i]`` and rows may be there several times; torch's COO tensors.
    """
    if isinstance(gradient, SparseVector):
        if tuple(gradient.shape) != shape:
            raise UsageError(
                f"{what}: a sparse gradient of shape {tuple(gradient.shape)}; the "
                f"parameter has {shape}; they must be equal"
            )
        return SparseVector(
            np.asarray(gradient.indices), np.asarray(gradient.values), shape
        )
    if is_tensor(gradient):
        rows, values = _parts_of_tensor(gradient, what)
    elif isinstance(gradient, tuple | list) and len(gradient) == 2:
        rows, values = (np.asarray(part) for part in gradient)
    else:
        raise UsageError(
            f"{what}: a {type(gradient).__name__} for a sparse parameter; expected a "
            f"SparseVector, (rows, values) or a COO tensor of torch"
        )
    if not shape or rows.ndim != 1 or values.shape != (len(rows), *shape[1:]):
        raise UsageError(
            f"{what}: {rows.shape} rows with values of shape {values.shape}; expected "
            f"one axis of rows and, for each, values of shape {shape[1:]}"
        )
    if len(rows) and not (rows.min() >= 0 and rows.max() < shape[0]):
        raise UsageError(
            f"{what}: rows from {rows.min()} to {rows.max()}; the parameter has "
            f"{shape[0]} rows; expected 0..{shape[0] - 1}"
        )
    return _elements(rows, values, shape)


def _parts_of_tensor(x: Any, what: str) -> tuple[Any, Any]:
    if not x.is_sparse or x.sparse_dim() != 1:
        raise UsageError(
            f"{what}: a dense tensor, or one with several sparse dimensions, for a "
            f"sparse parameter; expected a COO tensor whose indices name rows"
        )
    whole = x.detach().coalesce()
    return whole.indices()[0].numpy(), whole.values().contiguous().numpy()


def _elements(rows: Any, values: Any, shape: tuple[int, ...]) -> SparseVector:
    found, at = np.unique(rows, return_inverse=True)
    if len(found) == len(rows):
        total = np.empty_like(values)
        total[at] = values
    else:
        total = np.zeros((len(found), *shape[1:]), values.dtype)
        np.add.at(total, at, values)
    row = prod(shape[1:])
    kind = np.int32 if prod(shape) <= _INT32_MOST else np.int64
    places = (found.astype(np.int64)[:, None] * row + np.arange(row)).reshape(-1)
    return SparseVector(places.astype(kind), total.reshape(-1), shape)


def empty_sparse(shape: tuple[int, ...], dtype: np.dtype[Any]) -> SparseVector:
    """Return the contribution of a rank without a gradient."""
    kind = np.int32 if prod(shape) <= _INT32_MOST else np.int64
    return SparseVector(np.zeros(0, kind), np.zeros(0, dtype), shape)


def summed(one: SparseVector, other: SparseVector) -> SparseVector:
    """Return the sum of two gradients of one parameter."""
    places = np.concatenate([np.asarray(one.indices), np.asarray(other.indices)])
    values = np.concatenate([np.asarray(one.values), np.asarray(other.values)])
    found, at = np.unique(places, return_inverse=True)
    total = np.zeros(len(found), values.dtype)
    np.add.at(total, at, values)
    return SparseVector(found, total, one.shape)


def scaled(x: SparseVector, divisor: int) -> SparseVector:
    """Return ``x`` over ``divisor``."""
    if divisor == 1:
        return x
    values = x.values / x.values.dtype.type(divisor)
    return SparseVector(x.indices, values, x.shape)


def dense_rows(x: SparseVector) -> tuple[Any, Any]:
    """Return the rows that a reduced gradient touches, and their values.

    rows, values = dense_rows(gradient)
    table[rows] -= rate * values
    """
    row = prod(x.shape[1:])
    places = np.asarray(x.indices)
    if not row:
        return np.zeros(0, np.int64), np.zeros((0, *x.shape[1:]), x.values.dtype)
    rows, at = np.unique(places // row, return_inverse=True)
    values = np.zeros((len(rows), row), x.values.dtype)
    values[at, places % row] = x.values
    return rows, values.reshape(len(rows), *x.shape[1:])
