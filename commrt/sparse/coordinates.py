# SPDX-License-Identifier: Apache-2.0
"""Coordinates per dimension, and the numbers of elements that are made of them.

Sparse sums work on one number for each entry: the element's place in C order. It has 4
or 8 bytes, or 16 where the array has more elements than 8 bytes can number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from commrt import _native
from commrt.arrays.host import HostView, view
from commrt.errors import UsageError

__all__ = [
    "LARGEST_NUMBERED",
    "WIDE_NBYTES",
    "Keys",
    "coordinates_of",
    "number",
    "raise_if_outside",
    "words_of",
]

_kernels = _native.sparse
LARGEST_NUMBERED = 2**63 - 1
"""Most elements of an array whose elements int64 numbers."""
WIDE_NBYTES = 16


@dataclass(frozen=True)
class Keys:
    """Numbers of 16 bytes, with what a view of indices has."""

    owner: Any
    """Their memory, as an array of bytes."""
    count: int

    @property
    def address(self) -> int:
        """Address of the first one."""
        return int(self.owner.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return WIDE_NBYTES * self.count


def words_of(number: int) -> tuple[int, int]:
    """Return the lower word of a number, unsigned, and the upper one."""
    return number & (2**64 - 1), number >> 64


def number(
    what: str, given: HostView, num_values: int, shape: Sequence[int]
) -> HostView | Keys:
    """Return the numbers of elements, whose coordinates are the columns of ``given``.

    UsageError where there is not a row for each dimension, where a coordinate lies
    outside of its dimension, and where the columns do not ascend.
    """
    if given.on is not None:
        raise UsageError(
            f"{what}: indices per dimension are on a device: expected host memory, or "
            f"positions in C order with one axis"
        )
    rows, count = given.shape
    if rows != len(shape):
        raise UsageError(
            f"{what}: indices has shape {given.shape}; expected one axis, or a row for "
            f"each of the {len(shape)} dimensions of shape={tuple(shape)}"
        )
    if count != num_values:
        raise UsageError(
            f"{what}: {count} indices, but {num_values} values; there must be a value "
            f"for each index"
        )
    length = prod(shape)
    nbytes = given.dtype.itemsize if length <= 2**31 else 8
    if length > LARGEST_NUMBERED:
        nbytes = WIDE_NBYTES
    array: Any = given.array
    places = np.ascontiguousarray(np.asarray(array), np.int64)
    memory = np.empty(count * nbytes, np.uint8)
    to = memory.ctypes.data
    at = _kernels.number(nbytes, list(shape), places.ctypes.data, count, to)
    if at < count:
        raise_if_outside(what, places, shape)
    if nbytes == WIDE_NBYTES:
        at = _kernels.first_unordered(to, count)
    else:
        at = _kernels.first_wrong(nbytes, to, count, length)
    if at < count:
        _raise_unordered(what, places, at)
    if nbytes == WIDE_NBYTES:
        return Keys(memory, count)
    return view(memory.view(f"int{8 * nbytes}"), f"{what}: indices")


def coordinates_of(
    index_nbytes: int, shape: Sequence[int], numbers: Any, count: int
) -> Any:
    """Return an int64 array with the coordinates of numbers, a row per dimension."""
    found = np.empty((len(shape), count), np.int64)
    _kernels.locate(
        index_nbytes, list(shape), numbers.ctypes.data, count, found.ctypes.data
    )
    return found


def raise_if_outside(what: str, places: Any, shape: Sequence[int]) -> None:
    """Raise UsageError for the first coordinate outside of its dimension, if any."""
    for axis, (row, length) in enumerate(zip(places, shape, strict=True)):
        found = np.flatnonzero((row < 0) | (row >= length))
        if found.size:
            at = int(found[0])
            raise UsageError(
                f"{what}: indices[{axis}, {at}] is {row[at]}, out of range for "
                f"shape={tuple(shape)}; expected 0..{length - 1}"
            )


def _raise_unordered(what: str, places: Any, at: int) -> None:
    before, here = (tuple(places[:, i].tolist()) for i in (at - 1, at))
    if before == here:
        raise UsageError(
            f"{what}: indices[:, {at - 1}] and indices[:, {at}] are both {here}; each "
            f"index may be there once: add such values first"
        )
    raise UsageError(
        f"{what}: indices are not sorted: indices[:, {at - 1}] is {before}, "
        f"indices[:, {at}] is {here}; sort the columns by the first row, then the "
        f"second and so on, and the values with them"
    )
