# SPDX-License-Identifier: Apache-2.0
"""Arrays with strides, as halo exchange and redistribution take them."""

from __future__ import annotations

import ctypes
import math
from array import array as machine_array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from commrt import _native
from commrt.arrays.device import is_on_device, see
from commrt.arrays.foreign import asking
from commrt.arrays.host import plain_array, view
from commrt.boxes.host_plans import MOST_DIMS, ArrayLayout
from commrt.errors import BufferError_, UsageError
from commrt.vocabulary.dtypes import DTYPES, DType

__all__ = [
    "Addressed",
    "StridedArray",
    "address_table",
    "check_apart",
    "check_writable",
    "elements_at",
    "reach_of",
    "strided",
]

_shares_memory: Any = np.shares_memory
_may_share_memory: Any = np.may_share_memory
_MOST_WORK = 100_000
"""Work that numpy may spend on the question if two arrays overlap. Beyond it, commrt
assumes that they do."""


@dataclass(frozen=True)
class StridedArray:
    """The facts of an array, contiguous or not."""

    what: str
    """Name of the array in messages."""
    owner: Any
    """Keeping it alive keeps the memory alive, and where it is."""
    memory: npt.NDArray[Any]
    """The same elements, or their bytes, for numpy."""
    address: int
    """Address of the element with all indices 0."""
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from element to element, in each dimension."""
    writable: bool
    array: Any = None
    """The object that the user passed."""
    on: Any = None
    """The device that the memory is on; None for host memory."""
    device: int | None = None
    """Its number."""
    stream: int | None = None
    """The stream that the array says it is ordered by."""
    is_distinct: bool = False
    """True if it is known that no two elements share memory."""

    @property
    def layout(self) -> ArrayLayout:
        """Layout of the array in memory."""
        return ArrayLayout(self.dtype, self.strides)


def strided(array: Any, what: str) -> StridedArray:
    """Return the facts of ``array``; BufferError_ that names ``what`` if it has none.

    numpy arrays and those on devices may have any strides; others must be C-contiguous
    (``arrays.view``).
    """
    plain = _native.strided_view_of_numpy(array)
    if plain is not None:
        address, code, shape, strides, writable, is_distinct = plain
        return StridedArray(
            *(what, array, array, address, DTYPES[code], shape, strides, writable),
            array,
            is_distinct=is_distinct,
        )
    if is_on_device(array, what):
        found = _on_device(array, what)
    elif isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        mine = plain_array(array)
        if not mine.flags.aligned:
            raise BufferError_(f"{what} is not aligned: pass a copy of it")
        # Its type is judged like that of any other array.
        dtype = view(np.empty(0, mine.dtype), what).dtype
        found = StridedArray(
            what,
            array,
            mine,
            mine.ctypes.data,
            dtype,
            mine.shape,
            mine.strides,
            bool(mine.flags.writeable),
            array,
        )
    else:
        seen = view(array, what)
        memory: Any = (ctypes.c_ubyte * seen.nbytes).from_address(seen.address)
        found = StridedArray(
            what,
            seen.owner,
            np.frombuffer(memory, np.uint8) if seen.nbytes else np.empty(0, np.uint8),
            seen.address,
            seen.dtype,
            tuple(seen.shape),
            _contiguous(seen.shape, seen.dtype.itemsize),
            seen.writable,
            array,
        )
    if len(found.shape) > MOST_DIMS:
        raise BufferError_(
            f"{what} has {len(found.shape)} dimensions; expected at most {MOST_DIMS}: "
            f"reshape it"
        )
    return found


def _on_device(array: Any, what: str) -> StridedArray:
    with asking(array, what):
        seen = see(array, what, any_strides=True)
    strides = seen.strides
    if strides is None:
        strides = _contiguous(seen.shape, seen.dtype.itemsize)
    return StridedArray(
        what,
        array if seen.owner is None else (array, seen.owner),
        elements_at(seen.address, seen.shape, strides, seen.dtype.itemsize),
        seen.address,
        seen.dtype,
        seen.shape,
        strides,
        seen.writable,
        array,
        seen.device,
        seen.number,
        seen.stream,
    )


def reach_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return the bytes from the element with all indices 0 to lowest and highest."""
    reach = [(extent - 1) * step for extent, step in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)


def elements_at(
    address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> npt.NDArray[Any]:
    """Return an array of these places; that of a device nobody may look into."""
    if not math.prod(shape):
        return np.empty(0, np.uint8)
    low, high = reach_of(shape, strides)
    memory: Any = (ctypes.c_ubyte * (high - low + itemsize)).from_address(address + low)
    element = np.dtype((np.void, itemsize))
    made: npt.NDArray[Any] = np.ndarray(shape, element, memory, -low, strides)
    return made


def _contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(1, extent)
    return tuple(reversed(strides))


def check_writable(array: StridedArray) -> None:
    """Raise BufferError_ unless every element can be written, by itself."""
    if not array.writable:
        raise BufferError_(f"{array.what} is read-only: pass a writable array")
    if array.is_distinct or 0 in array.shape:
        return
    reach = array.dtype.itemsize
    pairs = zip(array.shape, array.strides, strict=True)
    for step, extent in sorted((abs(b), a) for a, b in pairs if a > 1):
        if step < reach:
            raise BufferError_(
                f"{array.what} with shape {array.shape} and strides {array.strides} "
                f"has elements that share memory: pass a copy of it"
            )
        reach += step * (extent - 1)


def check_apart(arrays: Sequence[StridedArray]) -> None:
    """Raise UsageError where two arrays have memory in common."""
    for one, other in combinations(arrays, 2):
        if not _may_share_memory(one.memory, other.memory):
            continue  # most are far apart, which takes a tenth of the time
        try:
            shared = _shares_memory(one.memory, other.memory, max_work=_MOST_WORK)
        except Exception as error:  # numpy 1 and 2 have its class in different places
            if type(error).__name__ != "TooHardError":
                raise
            shared = True
        if shared:
            raise UsageError(
                f"{other.what} overlaps {one.what}: pass arrays that share no memory"
            )


class Addressed(Protocol):
    """An array, as far as its address goes."""

    @property
    def address(self) -> int:
        """Address of the first element."""
        ...


def address_table(arrays: Iterable[Addressed]) -> tuple[machine_array[int], int]:
    """Return the arrays' addresses, as plans of boxes take them, and where they lie.

    They lie there as long as the first result is kept.
    """
    table = machine_array("Q", [each.address for each in arrays])
    return table, table.buffer_info()[0]
