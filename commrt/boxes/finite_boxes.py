# SPDX-License-Identifier: Apache-2.0
"""Looks for NaN and infinity in the boxes of arrays that are about to leave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from commrt import _native
from commrt.boxes.strided import StridedArray, elements_at, reach_of
from commrt.group.finite_values import (
    Checked,
    may_be_not_finite,
    not_finite,
    read_back,
)
from commrt.schedule.boxes import Box, Move

__all__ = ["check_finite_boxes"]


def check_finite_boxes(
    group: Checked,
    what: str,
    arrays: Sequence[StridedArray],
    moves: Iterable[Move],
    stream: Any = None,
) -> None:
    """Raise NotFiniteError where a checking group would send NaN or infinity.

    ``moves`` are this rank's; what stays on it is not looked at. ``stream``: the
    call's, as the caller gave it. The error's index counts elements in C order.
    """
    if not group.nan_check:
        return
    begins: dict[int, int | None] = {}
    kept: list[Any] = []
    for move in moves:
        box = move.source
        if box is None or move.peer is None or not box.count:
            continue
        array = arrays[box.array]
        if not may_be_not_finite(array.dtype):
            continue
        if box.array not in begins:
            begins[box.array] = _begin(what, array, stream, kept)
        begin = begins[box.array]
        if begin is None:  # a graph captures the call
            continue
        index, is_nan = _first_in(begin, array, box)
        if index >= 0:
            place = _place(array.shape, box, np.unravel_index(index, box.shape))
            where = place, math.prod(array.shape)
            argument = array.what.rsplit(": ", 1)[-1]
            raise not_finite(group, what, argument, where, is_nan=is_nan)


def _begin(what: str, array: StridedArray, stream: Any, kept: list[Any]) -> int | None:
    """Return where the first element lies in the host's memory; None in a capture.

    What has to stay for that is added to ``kept``.
    """
    if array.on is None:
        return array.address
    low, high = reach_of(array.shape, array.strides)
    nbytes = high - low + array.dtype.itemsize
    where = array.on, array.array, (stream, array.stream)
    memory = read_back(what, array.address + low, nbytes, *where)
    if memory is None:
        return None
    kept.append(memory)
    return int(memory.ctypes.data) - low


def _first_in(begin: int, array: StridedArray, box: Box) -> tuple[int, bool]:
    """Return index and kind of the first such element of a box, or -1."""
    strides = [array.strides[axis] * step for axis, step in _axes(box)]
    first = sum(a * stride for a, stride in zip(box.start, strides, strict=True))
    itemsize = array.dtype.itemsize
    part = elements_at(begin + first, box.shape, strides, itemsize)
    values = np.ascontiguousarray(part)
    return _native.first_not_finite(array.dtype.code, values.ctypes.data, box.count)


def _place(shape: Sequence[int], box: Box, index: Sequence[Any]) -> int:
    """Return the number, in C order, of an element of a box."""
    place = [0] * len(shape)
    for (axis, step), start, at in zip(_axes(box), box.start, index, strict=True):
        place[axis] += (start + int(at)) * step
    return int(np.ravel_multi_index(place, shape))


def _axes(box: Box) -> Sequence[tuple[int, int]]:
    """Return dimension of the array, and elements per step, of each of the box's."""
    return box.axes or [(axis, 1) for axis in range(len(box.start))]
