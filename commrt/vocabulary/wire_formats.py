# SPDX-License-Identifier: Apache-2.0
"""The formats that floats may be compressed to on the wire, and what can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commrt.errors import UsageError, shown, suggest
from commrt.vocabulary.dtypes import DType, ReduceOp

__all__ = [
    "COMPRESS",
    "COMPRESSED_DTYPES",
    "EXACT",
    "WIRE_FORMATS",
    "WireFormat",
    "check_compress",
    "why_not_compressed",
    "wire_format",
]

COMPRESS = "compress"
"""Name of the argument, and of a candidate's parameter."""
EXACT = "none"
"""The value that says: not compressed, whatever a table says."""


@dataclass(frozen=True)
class WireFormat:
    """One way to send floats in fewer bytes."""

    name: str
    """Value of ``compress=``."""
    code: int
    """The engine's code (native/kernels/wire.hpp)."""
    block: int
    """Elements that are put on the wire together."""
    itemsize: int
    """Bytes per element."""
    doc: str
    """A description, and the largest error of an element."""


WIRE_FORMATS: tuple[WireFormat, ...] = (
    WireFormat(
        "float16",
        0,
        64,
        2,
        "11 bits of precision: an element is off by at most max(abs(x) / 2^11, 2^-25); "
        "from 65520 on it is infinite",
    ),
    WireFormat(
        "bfloat16",
        1,
        64,
        2,
        "8 bits of precision, the range of float32: off by at most max(abs(x) / 2^8, "
        "2^-134)",
    ),
    WireFormat(
        "int8",
        2,
        256,
        1,
        "multiples of one scale for each 256 elements in a row, s = max(abs) / 127 of "
        "these, at least 2^-126: off by at most 0.5001 s; a NaN or an infinity makes "
        "them all NaN",
    ),
)
_BY_NAME = {one.name: one for one in WIRE_FORMATS}
_ELSEWHERE = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "i8": "int8",
    "q8": "int8",
}
COMPRESSED_DTYPES = ("float32", "float64")
"""Element types that can be compressed."""
_REDUCTIONS = (ReduceOp.SUM, ReduceOp.AVG)


def wire_format(name: str) -> WireFormat:
    """Return the format called ``name``."""
    return _BY_NAME[name]


def check_compress(name: Any) -> str:
    """Return a value of ``compress=``; UsageError says which there are."""
    known = (*_BY_NAME, EXACT)
    if not isinstance(name, str) or name not in known:
        raise UsageError(
            f"unknown compress={shown(name)}{suggest(name, known, _ELSEWHERE)}"
        )
    return name


def why_not_compressed(
    dtype: DType, reduces: bool, op: ReduceOp, users: bool = False
) -> str | None:
    """Return why an operation cannot be compressed, None where it can.

    Args:
        dtype: the type of its elements.
        reduces: whether it is a reduction.
        op: which one, unless it is the user's own.
        users: whether it is.
    """
    if dtype.name not in COMPRESSED_DTYPES:
        return f"x has dtype {dtype.name}, expected {' or '.join(COMPRESSED_DTYPES)}"
    if reduces and (users or op not in _REDUCTIONS):
        wanted = " or ".join(f"op={one.name.lower()!r}" for one in _REDUCTIONS)
        given = "a reduction of your own" if users else f"op={op.name.lower()!r}"
        return f"{given} cannot be reduced from compressed parts, expected {wanted}"
    return None
