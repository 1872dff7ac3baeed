# SPDX-License-Identifier: Apache-2.0
"""Known inputs and the results they must give, at the speed of memory.

Element i of rank r's input is ``i % 7 + r + 1``: small, different on each rank and in
each position of a block, and every result is periodic too. So filling and comparing
32 MiB takes milliseconds, and every repetition's time can be preceded by a full check.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from commrt.bench.timing_loop import Array, HostMemory, Memory
from commrt.vocabulary.operations import operation

__all__ = ["fill", "is_right"]

_PERIOD = 7
_EXACT_UP_TO = {
    "bfloat16": 256,
    "float16": 2048,
    "float8_e4m3fn": 16,
    "float8_e5m2": 8,
}
"""Integers up to here have no rounding; sums over many ranks go beyond."""
_HOST = HostMemory()
_WINDOW = _PERIOD << 14
"""Elements compared at a time; a multiple of the period."""


class _Piece(NamedTuple):
    """out[lo:hi] must be ``scale * ((first + i) % 7) + add``, i from 0."""

    lo: int
    hi: int
    first: int
    scale: int
    add: int


def fill(x: Any, rank: int, memory: Memory = _HOST) -> None:
    """Write the input of ``rank`` into an array that lies in ``memory``."""
    piece = _Piece(0, x.size, 0, 1, rank + 1)
    if isinstance(memory, HostMemory):
        _windows(x, piece, write=True)
        return
    values = np.empty(x.size, x.dtype)
    _windows(values, piece, write=True)
    memory.write(x, 0, values)


def is_right(
    coll: str, result: Array, *, rank: int, size: int, root: int, num_x: int
) -> bool:
    """Return whether ``result`` is what ``coll`` must leave on ``rank``."""
    return all(
        _windows(result, piece, write=False)
        for piece in _pieces(coll, result.size, rank, size, root, num_x)
    )


def _pieces(
    coll: str, num_out: int, rank: int, size: int, root: int, num_x: int
) -> list[_Piece]:
    spec = operation(coll)
    if spec.reduces:
        first = rank * num_out if spec.out_count == "div_size" else 0
        ranks = spec.contributors(rank, size)
        if not ranks:  # nothing is promised
            return []
        return [_Piece(0, num_out, first, len(ranks), sum(ranks) + len(ranks))]
    if spec.input_on == "root":
        first = rank * num_out if spec.out_count == "div_size" else 0
        return [_Piece(0, num_out, first, 1, root + 1)]
    # Blocks of a vector operation have equal lengths here.
    block = num_x // size if spec.by_pair else num_x
    first = rank * block if spec.by_pair else 0
    return [_Piece(s * block, (s + 1) * block, first, 1, s + 1) for s in range(size)]


def _windows(array: Array, piece: _Piece, *, write: bool) -> bool:
    length = min(_WINDOW, piece.hi - piece.lo)
    values = piece.scale * ((np.arange(length) + piece.first) % _PERIOD) + piece.add
    wanted = values.astype(array.dtype)
    slack = _slack(array.dtype, int(values.max(initial=0)), piece.scale)
    for lo in range(piece.lo, piece.hi, _WINDOW):
        window = array[lo : min(lo + _WINDOW, piece.hi)]
        if write:
            window[:] = wanted[: window.size]
        elif not _equal(window, wanted[: window.size], slack):
            return False
    return True


def _slack(dtype: np.dtype[Any], largest: int, summands: int) -> float:
    """Return the relative error that rounding allows; 0 where sums are exact."""
    exact_up_to = _EXACT_UP_TO.get(dtype.name)
    if exact_up_to is None or summands == 1 or largest <= exact_up_to:
        return 0.0
    return summands / exact_up_to


def _equal(result: Array, wanted: Array, slack: float) -> bool:
    if not slack:
        return np.array_equal(result, wanted)
    right = wanted.astype(np.float64)
    return bool(np.all(abs(result.astype(np.float64) - right) <= slack * right))
