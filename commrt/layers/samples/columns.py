# SPDX-License-Identifier: Apache-2.0
"""The arrays that samples consist of, and the place of each within a sample's bytes.

A sample is one row of each array. Its bytes stand side by side in a record, so that one
message moves whole samples, whatever arrays they have.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from commrt.arrays.foreign import asking
from commrt.arrays.tensors import check_memory, is_dense, is_tensor, of_own_class
from commrt.errors import BufferError_, UsageError, shown

__all__ = ["Bytes", "Column", "Columns"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
_SINGLE = "samples"
"""The name of an array that is passed without a mapping."""


@dataclass(frozen=True)
class Column:
    """One array of all samples, by its rows."""

    name: str
    is_tensor: bool
    """True: batches have tensors of torch; False: arrays of numpy."""
    dtype: Any
    """Of numpy, or of torch."""
    shape: tuple[int, ...]
    """Of one row."""
    nbytes: int
    """Of one row."""

    @classmethod
    def of(cls, name: str, array: Any) -> Column:
        """Return the column of an array, whose first dimension is that of samples."""
        shape = tuple(array.shape)
        if not shape:
            raise BufferError_(
                f"PartialShuffle: {name} has no dimension; expected an array whose "
                f"first dimension is that of samples"
            )
        nbytes = math.prod(shape[1:]) * array.dtype.itemsize
        return cls(name, is_tensor(array), array.dtype, shape[1:], nbytes)

    def __str__(self) -> str:
        kind = "tensor" if self.is_tensor else "array"
        return f"{self.name}: {kind} of {self.dtype!r} {self.shape}"

    def as_bytes(self, array: Any) -> Bytes:
        """Return an array's rows (samples, nbytes); a copy only where it must be."""
        number = len(array)
        if self.nbytes == 0 or number == 0:
            return np.empty((number, self.nbytes), np.uint8)
        if self.is_tensor:
            uint8 = sys.modules["torch"].uint8
            if array.dtype.itemsize == 1:
                array = array.view(uint8)  # torch cannot copy some types, such as int4
            flat = array.contiguous().view(-1).view(uint8).numpy()
        else:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        rows: Bytes = flat.reshape(number, self.nbytes)
        return rows

    def from_bytes(self, rows: Bytes) -> Any:
        """Return the array of rows (samples, nbytes) that are contiguous."""
        shape = (len(rows), *self.shape)
        if self.is_tensor:
            torch = sys.modules["torch"]
            if self.nbytes == 0 or not len(rows):
                return torch.empty(shape, dtype=self.dtype)
            return torch.from_numpy(rows.reshape(-1)).view(self.dtype).view(shape)
        if self.nbytes == 0 or not len(rows):
            return np.empty(shape, self.dtype)
        return rows.reshape(-1).view(self.dtype).reshape(shape)

    def parts(self, rows: Bytes, ends: Sequence[int]) -> list[Any]:
        """Return arrays of consecutive rows, each up to one of ``ends``.

        Arrays of numpy are views of one array. Tensors share none of torch's memory:
        views of one tensor count their changes together, so a change of one would stop
        the backward pass of another (torch's "modified by an inplace operation").
        """
        starts = (0, *ends[:-1])
        if self.is_tensor:
            return [
                self.from_bytes(rows[low:high])
                for low, high in zip(starts, ends, strict=True)
            ]
        whole = self.from_bytes(rows)
        return [whole[low:high] for low, high in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class Columns:
    """All arrays of samples, and how the caller passes them."""

    columns: tuple[Column, ...]
    """In the order of a mapping's keys."""
    is_mapping: bool
    """True: samples are mappings from names to arrays; False: one array."""

    @classmethod
    def of(cls, samples: Any) -> tuple[Columns, int, dict[str, Any]]:
        """Return the columns of samples, their number, and the arrays by name; local.

        Args:
            samples: an array, a tensor in the host's memory, or a mapping of such.

        Raises UsageError for anything else, and for arrays of different lengths.
        """
        is_mapping = isinstance(samples, Mapping)
        given = samples if is_mapping else {_SINGLE: samples}
        if not given:
            raise UsageError(
                "PartialShuffle: samples is an empty mapping; pass one array at least"
            )
        arrays = {name: _plain(name, array) for name, array in given.items()}
        columns = tuple(Column.of(name, array) for name, array in arrays.items())
        lengths = {name: len(array) for name, array in arrays.items()}
        if len({*lengths.values()}) > 1:
            raise UsageError(
                f"PartialShuffle: arrays have different numbers of samples "
                f"({lengths}); the first dimension must be the same"
            )
        return cls(columns, is_mapping), next(iter(lengths.values())), arrays

    @property
    def nbytes(self) -> int:
        """Bytes of a sample."""
        return sum(column.nbytes for column in self.columns)

    @property
    def offsets(self) -> dict[str, int]:
        """The first byte of each column in a record: by the order of names.

        Ranks may pass a mapping's keys in different orders.
        """
        found, at = {}, 0
        for column in sorted(self.columns, key=lambda column: column.name):
            found[column.name] = at
            at += column.nbytes
        return found

    def __str__(self) -> str:
        what = "mapping" if self.is_mapping else "one array"
        inside = sorted(map(str, self.columns))
        return f"{what} ({', '.join(inside)})"


def _plain(name: object, array: Any) -> Any:
    """Return an array of numpy, or a tensor of torch's own class on the host.

    Subclasses are taken by their memory. So those are refused whose values are more
    than that: masks, sparse and nested tensors, and elements that lie elsewhere.
    """
    if not isinstance(name, str):
        raise UsageError(
            f"PartialShuffle: {shown(name)} is a key of samples; expected names"
        )
    what = f"PartialShuffle: {name}"
    if is_tensor(array):
        found = of_own_class(array, what).detach()
        if not is_dense(found) or found.device.type != "cpu":
            kind = "nested" if found.is_nested else str(found.layout)
            kind = "quantized" if found.is_quantized else kind
            raise BufferError_(
                f"{what} is a tensor on {found.device} ({kind}); samples are kept in "
                f"the host's memory, dense: pass it as x.cpu(), x.to_dense(), "
                f"x.dequantize() or x.to_padded_tensor(...) returns it"
            )
        check_memory(found, what)
        return found.resolve_conj().resolve_neg()
    if not hasattr(array, "__array__"):
        raise BufferError_(
            f"{what} is {shown(array)}; expected an array of numpy or a tensor of torch"
        )
    with asking(array, what):
        made = np.asanyarray(array)
    if isinstance(made, np.ma.MaskedArray):
        raise BufferError_(
            f"{what} is a masked array, whose mask would stay behind: pass "
            f"x.filled(value), or x.data and numpy.ma.getmaskarray(x) as two arrays"
        )
    made = np.asarray(made)
    if made.dtype.hasobject:
        raise BufferError_(
            f"{what} has the type {made.dtype}, whose elements lie elsewhere; expected "
            f"elements of a fixed number of bytes"
        )
    return made
