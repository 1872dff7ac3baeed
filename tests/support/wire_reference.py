# SPDX-License-Identifier: Apache-2.0
"""What the wire formats do to numbers, in numpy, and how far off they may be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

BLOCK = {"float16": 64, "bfloat16": 64, "int8": 256}
_PLACES = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
LEAST_SCALE = np.float32(2.0**-126)
MOST_SCALE = np.float32(float.fromhex("0x1.020406p+121"))


def through_wire(name: str, x: Array) -> Array:
    """Return the float32 that the other side gets of these elements."""
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        if name == "float16":
            return x.astype(np.float16).astype(np.float32)
        if name == "bfloat16":
            return x.astype(ml_dtypes.bfloat16).astype(np.float32)
        parts = [_units(x[at : at + 256]) for at in range(0, len(x), 256)]
    return np.concatenate([*parts, x[:0]])


def _units(block: Array) -> Array:
    most = np.abs(block).max()
    if not np.isfinite(most):
        return np.full(len(block), np.nan, np.float32)
    scale = min(max(most / np.float32(127), LEAST_SCALE), MOST_SCALE)
    per_unit = np.float32(1) / scale
    return (np.rint(block * per_unit) * scale).astype(np.float32)


def off_by(name: str, magnitude: Array) -> Array:
    """Return how far an element may be off, given bounds of all magnitudes."""
    if name != "int8":
        relative, least = _PLACES[name]
        return np.maximum(relative * magnitude, least)
    most = np.zeros(len(magnitude))
    for at in range(0, len(magnitude), 256):
        most[at : at + 256] = magnitude[at : at + 256].max()
    return 0.5001 * np.maximum(most / 127, 2.0**-126)


def share_starts(name: str, count: int, size: int) -> list[int]:
    """Return where each rank's share of an allreduce begins, and the end."""
    block = BLOCK[name]
    num_blocks = -(-count // block)
    share = -(-num_blocks // size) * block
    return [min(count, rank * share) for rank in range(size + 1)]


def allreduce_off_by(name: str, inputs: list[Array], divisor: int = 1) -> Array:
    """Return how far each element of an allreduce may be off, in float64."""
    size, count = len(inputs), len(inputs[0])
    magnitudes = [np.abs(x.astype(np.float64)) for x in inputs]
    total = sum(magnitudes, np.zeros(count))
    owner = np.zeros(count, int)
    starts = share_starts(name, count, size)
    for rank in range(size):
        owner[starts[rank] : starts[rank + 1]] = rank
    first = np.zeros(count)
    for rank, magnitude in enumerate(magnitudes):
        first += np.where(owner == rank, 0, off_by(name, magnitude))
    # Every addition in float32 may be off by half a unit in the last place.
    first += (size + 1) * 2.0**-24 * (total + first)
    exact = np.abs(sum((x.astype(np.float64) for x in inputs), np.zeros(count)))
    said = (exact + first) / divisor * (1 + 2.0**-23)
    return first / divisor + off_by(name, said) + 2.0**-23 * said
