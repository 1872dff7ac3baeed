# SPDX-License-Identifier: Apache-2.0
"""Inputs whose sums show in which order they were added, and the sum from the left."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import OPERATIONS

Array = np.ndarray[Any, Any]
REDUCING = tuple(
    row.name for row in OPERATIONS if row.reduces and row.vector_of is None
)
TYPES = (
    "float32",
    "float64",
    "complex64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    owner: Any = ml_dtypes if dtype_by_name(name).needs_ml_dtypes else np
    return np.dtype(getattr(owner, name))


def telling(name: str, rank: int, count: int) -> Array:
    """Return numbers of both signs that swallow each other, as do 1e16, 1, -1e16.

    Every rank can make every rank's, and the same element differs on all of them.
    """
    kind = numpy_dtype(name)
    rng = np.random.default_rng([rank, count, dtype_by_name(name).code])
    digits = {1: 4, 2: 11}.get(kind.itemsize, 24 if name != "float64" else 53)
    power = rng.integers(-digits, digits // 2 if kind.itemsize < 4 else digits, count)
    if kind.itemsize == 1:
        power = rng.integers(-5, 6, count)
    values = np.ldexp(rng.choice([-1.0, 1.0], count) * rng.uniform(1, 2, count), power)
    if kind.kind == "c":
        return (values + 1j * values[::-1]).astype(kind)
    return values.astype(kind)


def same_numbers(a: Array, b: Array) -> bool:
    """Bitwise equality, but for the bits of NaNs."""
    raw = np.dtype(f"u{min(a.dtype.itemsize, 8)}")
    nan = (a != a) & (b != b)
    same = a.view(raw) == b.view(raw)
    if a.dtype.itemsize > raw.itemsize:
        same = same.reshape(-1, a.dtype.itemsize // raw.itemsize).all(axis=1)
    return bool((same | nan).all())


def from_the_left(xs: list[Array], op: str, factor: float) -> Array:
    """Return the sum or product in rank order; short floats are rounded once.

    What is multiplied first is rounded to its type, as it is when it is sent.
    """
    kind = xs[0].dtype
    with np.errstate(all="ignore"):
        if op in ("avg", "premul_sum"):
            xs = [scaled(x, factor) for x in xs]
        wide = np.float32 if kind.itemsize < 4 else kind
        total = xs[0].astype(wide)
        for x in xs[1:]:
            x = x.astype(wide)
            total = product(total, x) if op == "prod" else total + x
        return total.astype(kind)


def scaled(x: Array, factor: float) -> Array:
    if x.dtype.kind == "c":
        return scaled(x.view(x.real.dtype), factor).view(x.dtype)
    wide = np.dtype(np.float32) if x.dtype.itemsize < 4 else x.dtype
    return (x.astype(wide) * wide.type(factor)).astype(x.dtype)


def product(x: Array, y: Array) -> Array:
    if x.dtype.kind != "c":
        return x * y
    out = np.empty_like(x)
    out.real = x.real * y.real - x.imag * y.imag
    out.imag = x.real * y.imag + x.imag * y.real
    return out
