# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices in compressed rows (CSR): checked once, cut, permuted, multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt import _native
from commrt.errors import UsageError, shown
from commrt.vocabulary.dtypes import dtype_by_name

__all__ = ["CsrMatrix", "as_csr"]

Array = npt.NDArray[Any]
Range = tuple[int, int]
_NARROW = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class CsrMatrix:
    """A sparse matrix whose indices are right; its arrays never change.

    ``as_csr`` makes one of what a program has. Entries of a row may have any order. A
    place that is there several times stands for the sum. The arrays that are given
    become read-only. Raises UsageError for arrays that are no such matrix.
    """

    indptr: Array
    """Where each row begins, and the last one ends."""
    indices: Array
    """The column of each entry, of the same type: int32 or int64."""
    data: Array
    """The value of each entry: float32 or float64."""
    shape: tuple[int, int]
    """Rows and columns."""

    def __post_init__(self) -> None:
        arrays = self.indptr, self.indices, self.data
        if (
            self.indptr.dtype != self.indices.dtype
            or self.indices.dtype not in (np.int32, np.int64)
            or not all(array.flags.c_contiguous for array in arrays)
        ):
            raise UsageError(
                f"CsrMatrix: indptr is {self.indptr.dtype} and indices "
                f"{self.indices.dtype}; expected int32 or int64 for both, and arrays "
                f"without gaps: as_csr makes such"
            )
        for name in ("indptr", "indices", "data"):
            array = getattr(self, name)
            if array.base is not None:  # whoever holds that could still write
                array = array.copy()
                object.__setattr__(self, name, array)
            array.flags.writeable = False
        _check("CsrMatrix", self.indptr, self.indices, self.data, self.shape)

    @property
    def num_entries(self) -> int:
        """Entries that are kept, whatever their values."""
        return len(self.indices)

    @classmethod
    def from_entries(
        cls, rows: Array, columns: Array, values: Array, shape: tuple[int, int]
    ) -> CsrMatrix:
        """Return the matrix of entries in any order; indices are not checked."""
        kind = _index_type(shape, len(rows))
        indptr = np.zeros(shape[0] + 1, kind)
        np.cumsum(np.bincount(rows, minlength=shape[0]), out=indptr[1:])
        order = np.argsort(rows, kind="stable")
        return cls(indptr, columns[order].astype(kind), values[order], shape)

    def rows(self) -> Array:
        """Return the row of each entry."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))

    def transposed(self) -> CsrMatrix:
        """Return the transpose; entries of its rows ascend by column."""
        kind = self.indices.dtype
        indptr = np.empty(self.shape[1] + 1, kind)
        indices, data = np.empty_like(self.indices), np.empty_like(self.data)
        _native.csr.transpose(
            *self._head(),
            *self.shape,
            *(array.ctypes.data for array in (indptr, indices, data)),
        )
        return CsrMatrix(indptr, indices, data, (self.shape[1], self.shape[0]))

    def block(self, rows: Range, columns: Range) -> CsrMatrix:
        """Return the block of these rows and columns, with indices of its own."""
        low, high = self.indptr[rows[0]], self.indptr[rows[1]]
        indices = self.indices[low:high]
        inside = (indices >= columns[0]) & (indices < columns[1])
        before = np.concatenate([[0], np.cumsum(inside)])
        shape = rows[1] - rows[0], columns[1] - columns[0]
        kind = _index_type(shape, int(before[-1]))
        return CsrMatrix(
            before[self.indptr[rows[0] : rows[1] + 1] - low].astype(kind),
            (indices[inside] - columns[0]).astype(kind),
            self.data[low:high][inside],
            shape,
        )

    def permuted(self, rows: Array, columns: Array) -> CsrMatrix:
        """Return the matrix whose place (i, j) is this one's (rows[i], columns[j])."""
        lengths = np.diff(self.indptr)[rows]
        indptr = np.zeros_like(self.indptr)
        np.cumsum(lengths, out=indptr[1:])
        shift = np.repeat(self.indptr[:-1][rows] - indptr[:-1], lengths)
        taken = shift + np.arange(self.num_entries)
        place = np.empty(self.shape[1], self.indices.dtype)
        place[columns] = np.arange(self.shape[1])
        return CsrMatrix(
            indptr, place[self.indices[taken]], self.data[taken], self.shape
        )

    def times(self, x: Array, out: Array, rows: Range | None = None) -> Array:
        """Write the product with a dense matrix, or some rows of it; return ``out``.

        Args:
            x: of the matrix's columns by any number, row by row without gaps.
            out: of the matrix's rows by that number, likewise.
            rows: the rows of ``out`` that are written; None: all.

        Bits are those of ``scipy.sparse``: products are rounded, and added in the order
        of the row's entries. Runs without the GIL.
        """
        first, last = rows or (0, self.shape[0])
        for name, array, extent in (
            ("x", x, self.shape[1]),
            ("out", out, self.shape[0]),
        ):
            if (
                array.dtype != self.data.dtype
                or array.ndim != 2
                or array.shape[0] != extent
                or array.shape[1] != x.shape[1]
                or not array.flags.c_contiguous
            ):
                raise UsageError(
                    f"CsrMatrix.times: {name} is a {array.dtype} array of shape "
                    f"{array.shape}; expected {self.data.dtype}, {extent} rows and as "
                    f"many columns as x, without gaps"
                )
        if not 0 <= first <= last <= self.shape[0] or not out.flags.writeable:
            raise UsageError(
                f"CsrMatrix.times: rows={shown(rows)} of {self.shape[0]} cannot be "
                f"written: expected a range of them, and memory that can change"
            )
        _native.csr.multiply(
            *self._head(), x.ctypes.data, out.ctypes.data, first, last, x.shape[1]
        )
        return out

    def _head(self) -> tuple[int, int, int, int, int]:
        """Return types and addresses, as the kernels take them."""
        arrays = self.indptr, self.indices, self.data
        one, other, third = (array.ctypes.data for array in arrays)
        code = dtype_by_name(self.data.dtype.name).code
        return self.indices.itemsize, code, one, other, third


def as_csr(given: Any, what: str = "graph") -> CsrMatrix:
    """Return a program's sparse matrix, checked and copied.

    Args:
        given: ``(indptr, indices, data)`` of a square matrix, the same with its shape,
            a CSR tensor of torch, or an object with these four attributes, such as
            scipy's ``csr_matrix``.
        what: its name in errors.

    Raises UsageError for arrays that are no such matrix: indices out of range, row
    ends that descend, other lengths or types.
    """
    if isinstance(given, CsrMatrix):
        return given
    indptr, indices, data, shape = _parts(given, what)
    _check(what, indptr, indices, data, shape)
    kind = _index_type(shape, len(indices))
    if indices.dtype == indptr.dtype == np.int64:
        kind = np.dtype(np.int64)
    return CsrMatrix(indptr.astype(kind), indices.astype(kind), data.copy(), shape)


def _parts(given: Any, what: str) -> tuple[Array, Array, Array, tuple[int, int]]:
    """Return the arrays of a matrix, and its shape."""
    if hasattr(given, "crow_indices"):
        if str(getattr(given, "layout", "")) != "torch.sparse_csr":
            raise UsageError(
                f"{what}: a {getattr(given, 'layout', 'dense')} tensor of torch; "
                f"expected a CSR tensor: call to_sparse_csr()"
            )
        held = given.detach()
        parts = held.crow_indices(), held.col_indices(), held.values()
        rows, columns = held.shape
        return *(np.asarray(part) for part in parts), (rows, columns)  # type: ignore[return-value]
    if isinstance(given, tuple | list) and len(given) in (3, 4):
        indptr, indices, data = (
            np.asarray(part, np.int64 if index < 2 and not len(part) else None)
            for index, part in enumerate(given[:3])
        )
        shape = given[3] if len(given) == 4 else 2 * (max(indptr.size - 1, 0),)
    elif (
        all(hasattr(given, name) for name in ("indptr", "indices", "data", "shape"))
        and getattr(given, "format", "csr") == "csr"
    ):
        indptr, indices, data = map(
            np.asarray, (given.indptr, given.indices, given.data)
        )
        shape = given.shape
    else:
        raise UsageError(
            f"{what}: {shown(given)} is no matrix in compressed rows; expected "
            f"(indptr, indices, data), a CSR tensor of torch, or an object with these "
            f"attributes and shape"
        )
    rows, columns = (int(extent) for extent in shape)
    return indptr, indices, data, (rows, columns)


def _check(
    what: str, indptr: Array, indices: Array, data: Array, shape: tuple[int, int]
) -> None:
    """Raise UsageError unless the arrays are a matrix of this shape."""
    if data.dtype not in (np.float32, np.float64):
        raise UsageError(
            f"{what}: values are {data.dtype}; expected float32 or float64: convert "
            f"them first"
        )
    if not {indptr.dtype.kind, indices.dtype.kind} <= {"i", "u"} or not (
        indptr.ndim == indices.ndim == data.ndim == 1
    ):
        raise UsageError(
            f"{what}: indptr is {indptr.dtype} with {indptr.ndim} dimensions, indices "
            f"{indices.dtype} with {indices.ndim}, data has {data.ndim}; expected "
            f"integers, and one dimension each"
        )
    _check_rows(what, indptr, shape[0], len(indices), len(data))
    if len(indices) and not 0 <= indices.min() <= indices.max() < shape[1]:
        raise UsageError(
            f"{what}: columns from {indices.min()} to {indices.max()} in a matrix of "
            f"shape {shape}; expected 0..{shape[1] - 1}"
        )


def _check_rows(
    what: str, indptr: Array, num_rows: int, num_indices: int, num_values: int
) -> None:
    """Raise UsageError unless the rows' ends cover the entries."""
    if len(indptr) != num_rows + 1 or num_indices != num_values:
        raise UsageError(
            f"{what}: {len(indptr)} row ends, {num_indices} columns and {num_values} "
            f"values; expected {num_rows + 1} row ends for {num_rows} rows, and a "
            f"column for each value"
        )
    ends = int(indptr[0]), int(indptr[-1])
    if ends != (0, num_indices):
        raise UsageError(
            f"{what}: rows begin at {ends[0]} and end at {ends[1]}; expected 0 and "
            f"{num_indices}, the number of entries"
        )
    descends = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(descends):
        raise UsageError(
            f"{what}: row {descends[0]} ends before it begins: indptr must ascend"
        )


def _index_type(shape: tuple[int, int], num_entries: int) -> np.dtype[Any]:
    """Return the narrowest type that can hold a matrix's indices."""
    return np.dtype(np.int32 if max(*shape, num_entries) <= _NARROW else np.int64)
