# SPDX-License-Identifier: Apache-2.0
"""Element types and reductions, with the codes that the engine uses for them.

The codes are shared with ``native/types.hpp``; a unit test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from commrt.errors import UsageError, shown, suggest

__all__ = [
    "DTYPES",
    "DType",
    "ReduceOp",
    "check_factor",
    "check_reduction",
    "dtype_by_name",
    "engine_factor",
]

Kind = Literal["bool", "int", "uint", "float", "complex", "bytes"]


@dataclass(frozen=True)
class DType:
    """One element type that the engine can move and reduce."""

    name: str
    """numpy's (or ml_dtypes') name."""
    code: int
    """The engine's code."""
    itemsize: int
    """Bytes per element."""
    kind: Kind
    """Kind of the type, which decides the reductions it has."""

    @property
    def is_short_float(self) -> bool:
        """True if it is reduced in float32, and rounded once for all inputs."""
        return self.kind == "float" and self.itemsize < 4

    @property
    def needs_ml_dtypes(self) -> bool:
        """True if numpy has it only from the package ml_dtypes."""
        return self.is_short_float and self.name != "float16"


DTYPES: tuple[DType, ...] = (
    DType("bool", 0, 1, "bool"),
    DType("int8", 1, 1, "int"),
    DType("int16", 2, 2, "int"),
    DType("int32", 3, 4, "int"),
    DType("int64", 4, 8, "int"),
    DType("uint8", 5, 1, "uint"),
    DType("uint16", 6, 2, "uint"),
    DType("uint32", 7, 4, "uint"),
    DType("uint64", 8, 8, "uint"),
    DType("float16", 9, 2, "float"),
    DType("bfloat16", 10, 2, "float"),
    DType("float32", 11, 4, "float"),
    DType("float64", 12, 8, "float"),
    DType("complex64", 13, 8, "complex"),
    DType("complex128", 14, 16, "complex"),
    DType("float8_e4m3fn", 15, 1, "float"),
    DType("float8_e5m2", 16, 1, "float"),
)

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


class ReduceOp(IntEnum):
    """Reductions; the value is the engine's code."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    LAND = 5
    LOR = 6
    LXOR = 7
    BAND = 8
    BOR = 9
    BXOR = 10
    PREMUL_SUM = 11


_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def dtype_by_name(name: str) -> DType:
    """Return the element type called ``name``, or raise UsageError."""
    found = _BY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        raise UsageError(f"unknown dtype {shown(name)}{suggest(name, _BY_NAME)}")
    return found


def check_reduction(op: ReduceOp, dtype: DType) -> None:
    """Raise UsageError where ``op`` has no meaning on ``dtype``.

    avg and premul_sum on bool, bitwise on floats and complex, and min and max on
    complex are errors.
    """
    wrong = (
        (op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) and dtype.kind == "bool")
        or (op in _BITWISE and dtype.kind in ("float", "complex"))
        or (op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.kind == "complex")
    )
    if wrong:
        raise UsageError(
            f"op={op.name.lower()!r} is not defined for {dtype.name}: "
            f"cast the array, or choose another reduction"
        )


def check_factor(factor: int | float, dtype: DType) -> None:
    """Raise UsageError unless ``factor`` can be multiplied in ``dtype``, as NCCL does.

    Integers are multiplied in their own type, where they wrap; it must hold the factor.
    """
    if dtype.kind in ("float", "complex"):
        try:
            float(factor)
        except OverflowError:
            raise UsageError(
                f"factor is an integer of {int(factor).bit_length()} bits, too large "
                f"for {dtype.name}"
            ) from None
        return
    if not isinstance(factor, int):
        raise UsageError(
            f"factor={shown(factor)} must be an integer for {dtype.name}, which is "
            f"multiplied in its own type: cast the array to a float type"
        )
    bits = 8 * dtype.itemsize
    low, high = (0, 2**bits - 1) if dtype.kind == "uint" else _signed_range(bits)
    if not low <= factor <= high:
        raise UsageError(
            f"factor={shown(factor)} does not fit into {dtype.name}: expected "
            f"{low}..{high}"
        )


def _signed_range(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def engine_factor(factor: int | float, dtype: DType) -> tuple[float, int]:
    """Return what the engine multiplies by: floats the first, integers the second.

    The second is the factor's low 64 bits as a signed number.
    """
    if dtype.kind in ("float", "complex"):
        return float(factor), 1
    return 1.0, (int(factor) + 2**63) % 2**64 - 2**63
