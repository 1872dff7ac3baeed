# SPDX-License-Identifier: Apache-2.0
"""Sparse vectors as users hold them: checked on the way in, built on the way out.

Accepted are ``SparseVector``, (indices, values, shape), scipy's sparse arrays, torch's
COO tensors, and any object with those three attributes. None of these libraries is
imported: objects are known by what they have.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from commrt import _native
from commrt.arrays.device import is_on_device
from commrt.arrays.foreign import asking
from commrt.arrays.host import HostView, view_anywhere, zeros_like_array
from commrt.arrays.tensors import is_tensor
from commrt.errors import BufferError_, UsageError, shown
from commrt.sparse.coordinates import (
    LARGEST_NUMBERED,
    WIDE_NBYTES,
    Keys,
    number,
    raise_if_outside,
)
from commrt.vocabulary.checks import as_integer, as_items
from commrt.vocabulary.dtypes import DType

__all__ = [
    "MAX_DIMS",
    "SparseArgument",
    "SparseVector",
    "check_shape",
    "parse",
    "parts_on_device",
]

MAX_DIMS = 8
_MOST_ELEMENTS = 2**126


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector, or an array seen as one, of which only some elements are stored.

    ``indices`` are positions in the array read in C order, or coordinates: one row for
    each dimension, one column for each entry. Both are sorted in C order, each of them
    once. An array of 2**63 elements and more has coordinates only.
    """

    indices: Any
    """int32 or int64, of shape (nnz,) or (dimensions, nnz)."""
    values: Any
    """Values of the entries, one for each index; all other elements are zero."""
    shape: tuple[int, ...]
    """Shape of the whole array."""

    def __post_init__(self) -> None:
        what = "SparseVector"
        object.__setattr__(self, "shape", check_shape(what, self.shape))
        indices = _num_entries(f"{what}: indices", self.indices, len(self.shape))
        values = _num_entries(f"{what}: values", self.values)
        if indices != values:
            raise UsageError(
                f"{what}: {indices} indices, but {values} values; there must be a "
                f"value for each index"
            )

    @property
    def nnz(self) -> int:
        """Number of stored elements, zeros among them included."""
        return int(self.values.shape[0])

    @property
    def coordinates(self) -> Any:
        """Coordinates of the entries, with a row for each dimension, in the library of
        ``indices``."""
        indices = self.indices
        if len(indices.shape) == 2:
            return indices
        found: list[Any] = []
        for length in reversed(self.shape):
            found.insert(0, indices % length)
            indices = indices // length
        if is_tensor(indices):
            none = indices.new_empty(0, self.nnz)
            return sys.modules["torch"].stack(found) if found else none
        return np.stack(found) if found else np.empty((0, self.nnz), np.int64)

    def to_dense(self) -> Any:
        """Return the whole array, in the library of ``values``."""
        values, indices = self.values, self.indices
        seen = view_anywhere(values, "SparseVector: values")
        if prod(self.shape) * seen.dtype.itemsize > LARGEST_NUMBERED:
            raise UsageError(
                f"SparseVector: shape={self.shape} has {prod(self.shape)} elements, "
                f"more than any array can hold"
            )
        whole = zeros_like_array(seen, (prod(self.shape),))
        if is_tensor(indices):
            indices = indices.long()
        elif isinstance(values, np.ndarray):
            indices = np.asarray(indices)
        try:
            if len(indices.shape) == 2:
                whole = whole.reshape(self.shape)
                indices = tuple(indices)
            whole[indices] = values
        except (IndexError, TypeError, ValueError) as error:
            raise UsageError(
                f"SparseVector: indices are no positions in an array of "
                f"shape={self.shape}: {error}"
            ) from error
        return whole.reshape(self.shape)

    def __repr__(self) -> str:
        return (
            f"SparseVector(nnz={self.nnz}, shape={self.shape}, "
            f"dtype={self.values.dtype}, indices={self.indices.dtype})"
        )


def _num_entries(what: str, array: Any, rows: int | None = None) -> int:
    """Return the length of an array with one axis; BufferError_ for all else.

    Or that of its rows, if it has so many.
    """
    try:
        *found, length = array.shape
        if found and found != [rows]:
            length = None
        if hasattr(array, "dtype") and not isinstance(array, type):
            return operator.index(length)
    except Exception:  # noqa: BLE001 - an object of the program raises what it likes
        length = None
    raise BufferError_(
        f"{what} is a {type(array).__name__}: expected an array with one axis, such as "
        f"numpy's or torch's"
    )


@dataclass(frozen=True)
class SparseArgument:
    """An argument, checked."""

    indices: HostView | Keys
    values: HostView
    shape: tuple[int, ...]
    by_dimension: bool = False
    """True if its indices were coordinates, as those of the result are to be."""

    @property
    def count(self) -> int:
        """Entries."""
        return self.values.count

    @property
    def length(self) -> int:
        """Elements of the whole vector."""
        return prod(self.shape)

    @property
    def index_nbytes(self) -> int:
        """4, 8 or 16."""
        indices = self.indices
        return WIDE_NBYTES if isinstance(indices, Keys) else indices.dtype.itemsize

    @property
    def dtype(self) -> DType:
        """Type of the values."""
        return self.values.dtype


def parse(what: str, x: Any) -> SparseArgument:
    """Return the sparse vector ``x``; UsageError says what is wrong with it."""
    with asking(x, f"{what}: x"):
        indices, values, shape = _parts(what, x)
    where = f"{what}: indices"
    of_indices = view_anywhere(indices, where)
    of_values = view_anywhere(values, f"{what}: values")
    shape = check_shape(what, shape)
    if of_indices.dtype.name not in ("int32", "int64"):
        raise BufferError_(
            f"{where} has dtype {of_indices.dtype.name}; expected int32 or int64"
        )
    by_dimension = len(of_indices.shape) == 2
    for name, one in (("indices", of_indices), ("values", of_values)):
        if len(one.shape) != 1 and not (one is of_indices and by_dimension):
            raise UsageError(f"{what}: {name} has shape {one.shape}; expected one axis")
    if by_dimension:
        keys = number(what, of_indices, of_values.count, shape)
        return SparseArgument(keys, of_values, shape, by_dimension=True)
    argument = SparseArgument(of_indices, of_values, shape)
    if argument.length > LARGEST_NUMBERED:
        raise UsageError(
            f"{what}: shape={shape} has {argument.length} elements, more than int64 "
            f"can number; pass indices of shape ({len(shape)}, {of_values.count}), "
            f"with a row for each dimension"
        )
    if of_indices.count != of_values.count:
        raise UsageError(
            f"{what}: {of_indices.count} indices, but {of_values.count} values; there "
            f"must be a value for each index"
        )
    check_width(what, argument)
    if of_indices.on is None:  # on a device the host does not see them yet
        check_indices(what, argument)
    return argument


def check_width(what: str, argument: SparseArgument) -> None:
    """Raise UsageError where the indices' type cannot name all elements."""
    if argument.index_nbytes == 4 and argument.length > 2**31:
        raise UsageError(
            f"{what}: shape={argument.shape} has {argument.length} elements, more than "
            f"int32 indices can name; pass int64 indices"
        )


def check_indices(what: str, argument: SparseArgument) -> None:
    """Raise UsageError unless positions ascend and lie in the shape."""
    at = _native.sparse.first_wrong(
        argument.index_nbytes, argument.indices.address, argument.count, argument.length
    )
    if at == argument.count:
        return
    index = _index_at(argument, at)
    if not 0 <= index < argument.length:
        raise UsageError(
            f"{what}: indices[{at}] is {index}, out of range for "
            f"shape={argument.shape}; expected 0..{argument.length - 1}"
        )
    before = _index_at(argument, at - 1)
    if index == before:
        raise UsageError(
            f"{what}: indices[{at - 1}] and indices[{at}] are both {index}; each index "
            f"may be there once: add such values first"
        )
    raise UsageError(
        f"{what}: indices are not sorted: indices[{at - 1}] is {before}, "
        f"indices[{at}] is {index}; sort them, and the values with them"
    )


def _index_at(argument: SparseArgument, at: int) -> int:
    assert not isinstance(argument.indices, Keys), "these are checked on their way"
    indices: Any = argument.indices.array
    return int(np.asarray(indices).reshape(-1)[at])


def check_shape(what: str, shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of integers, or raise UsageError."""
    number = as_integer(shape)
    items = as_items(shape) if number is None else [number]
    sizes = [None] if items is None else [*map(as_integer, items)]
    found = [size for size in sizes if size is not None and size >= 0]
    is_right = len(found) == len(sizes) and len(found) <= MAX_DIMS
    if (
        not is_right
        or max(found, default=0) > LARGEST_NUMBERED
        or prod(found) > _MOST_ELEMENTS
    ):
        raise UsageError(
            f"{what}: shape={shown(shape)} must be a number of elements, or up to "
            f"{MAX_DIMS} of them, from 0 to 2**63 - 1 each, and 2**126 in all"
        )
    return tuple(found)


def _parts(what: str, x: Any) -> tuple[Any, Any, Any]:
    if isinstance(x, SparseVector):
        return x.indices, x.values, x.shape
    if isinstance(x, tuple | list) and len(x) == 3:
        indices, values, shape = x
        return indices, values, shape
    if callable(getattr(x, "tocoo", None)):
        return _parts_of_scipy(what, x)
    if callable(getattr(x, "is_coalesced", None)) and getattr(x, "is_sparse", False):
        return _parts_of_torch(what, x)
    parts = [getattr(x, name, None) for name in ("indices", "values", "shape")]
    if any(part is None or callable(part) for part in parts):
        raise UsageError(
            f"{what}: x is a {type(x).__name__}; expected a SparseVector, (indices, "
            f"values, shape), a scipy or torch COO array, or an object with indices, "
            f"values and shape"
        )
    return parts[0], parts[1], parts[2]


def parts_on_device(what: str, x: Any) -> tuple[Any, Any, Any] | None:
    """Return indices, values and shape of a sparse vector on a device, else None."""
    if is_tensor(x) and x.is_sparse and x.device.type == "cuda":
        return _parts_on_gpu(what, x)
    if isinstance(x, SparseVector):
        x = x.indices, x.values, x.shape
    if not isinstance(x, tuple | list) or len(x) != 3:
        return None
    indices, values, shape = x
    named = ((indices, f"{what}: x[0]"), (values, f"{what}: x[1]"))
    on_device = any(is_on_device(array, name) for array, name in named)
    return (indices, values, shape) if on_device else None


def _parts_on_gpu(what: str, x: Any) -> tuple[Any, Any, Any]:
    """Return those of a torch tensor, flat, without a copy to the host."""
    _check_of_torch(what, x)
    coords, shape = x.indices(), tuple(x.shape)
    if prod(shape) > LARGEST_NUMBERED:
        return coords, x.values().contiguous(), shape
    flat = coords[0]
    for axis in range(1, len(shape)):
        flat = flat * shape[axis] + coords[axis]
    return flat.contiguous(), x.values().contiguous(), shape


def _parts_of_scipy(what: str, x: Any) -> tuple[Any, Any, Any]:
    coo = x.tocoo()
    coords = getattr(coo, "coords", None) or (coo.row, coo.col)
    return _flat(what, coords, x.shape), np.asarray(coo.data), tuple(x.shape)


def _parts_of_torch(what: str, x: Any) -> tuple[Any, Any, Any]:
    _check_of_torch(what, x)
    coords: Sequence[Any] = list(x.indices().numpy())
    return _flat(what, coords, tuple(x.shape)), x.values(), tuple(x.shape)


def _check_of_torch(what: str, x: Any) -> None:
    if not x.is_coalesced():
        raise UsageError(
            f"{what}: x is a COO tensor that is not coalesced: its indices may be "
            f"unsorted or there twice; pass x.coalesce()"
        )
    if x.dense_dim():
        raise UsageError(
            f"{what}: x has {x.dense_dim()} dense dimensions; expected a COO tensor "
            f"whose values are numbers"
        )


def _flat(what: str, coords: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return positions in C order for a list of coordinates per axis."""
    if len(coords) == 1:
        return np.ascontiguousarray(coords[0])
    if prod(shape) > LARGEST_NUMBERED:
        return np.stack([np.asarray(c, np.int64) for c in coords])
    places = tuple(np.asarray(c) for c in coords)
    try:
        flat = np.ravel_multi_index(places, tuple(shape))
    except ValueError:
        raise_if_outside(what, places, shape)
        raise
    return flat.astype(np.int32 if prod(shape) <= 2**31 else np.int64)
