# SPDX-License-Identifier: Apache-2.0
"""The kernels' text: one module of CUDA C for each element type, and one for bytes.

The texts in ``text/`` say how items are combined and memory is walked; what is written
here is which functions there are. Names are those that ``cuda_device.cpp`` looks
up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from commrt.errors import UsageError
from commrt.vocabulary.dtypes import DTYPES, DType, ReduceOp, check_reduction

__all__ = ["BYTES", "Module", "modules", "prelude", "reductions"]

_TEXT = Path(__file__).parent / "text"
_FILES = ("words", "types", "reductions", "vectors", "boxes")
_TYPES = {
    "bool": "Bool",
    "bfloat16": "BFloat16",
    "float8_e4m3fn": "Float8E4M3",
    "float8_e5m2": "Float8E5M2",
}
_OF_BOOL = {
    ReduceOp.SUM: ReduceOp.LOR,
    ReduceOp.PROD: ReduceOp.LAND,
    ReduceOp.MIN: ReduceOp.LAND,
    ReduceOp.MAX: ReduceOp.LOR,
    ReduceOp.BAND: ReduceOp.LAND,
    ReduceOp.BOR: ReduceOp.LOR,
    ReduceOp.BXOR: ReduceOp.LXOR,
}
"""Logical reduction that stands for each other one on bool."""
BYTES = "bytes"
"""The module that moves bytes."""
_ARRAYS = "COMMRT_PARAMETER Arrays arrays"
_TABLE = "COMMRT_PARAMETER Table table"


@dataclass(frozen=True)
class Module:
    """A text to compile, and the functions in it."""

    name: str
    """The element type, or BYTES."""
    body: str
    """The functions, without what they are made of."""
    kernels: tuple[str, ...]
    """Their names."""

    @property
    def source(self) -> str:
        """The whole text."""
        return prelude() + self.body


def reductions(dtype: DType) -> tuple[ReduceOp, ...]:
    """Return the reductions that have a meaning on ``dtype``."""
    return tuple(op for op in ReduceOp if _is_defined(op, dtype))


def _is_defined(op: ReduceOp, dtype: DType) -> bool:
    try:
        check_reduction(op, dtype)
    except UsageError:
        return False
    return True


@cache
def prelude() -> str:
    """Return the text that all modules begin with."""
    return "\n".join((_TEXT / f"{name}.cuh").read_text() for name in _FILES)


@cache
def modules() -> tuple[Module, ...]:
    """Return all modules: that of bytes, then in the order of the types' codes."""
    kinds = {dtype.name: list(_of_type(dtype)) for dtype in DTYPES}
    return tuple(
        Module(
            name,
            "".join(f"COMMRT_KERNEL {text}\n" for _, text in kernels),
            tuple(name for name, _ in kernels),
        )
        for name, kernels in {BYTES: list(_of_bytes()), **kinds}.items()
    )


def _of_bytes() -> Iterator[tuple[str, str]]:
    """Yield names and texts of what is the same for all types."""
    yield (
        "commrt_copy",
        "commrt_copy(void* dst, const void* src, u64 nbytes) "
        "{ copy(dst, src, nbytes); }",
    )
    for name, packs in (("pack", "true"), ("unpack", "false")):
        yield (
            f"commrt_{name}",
            f"commrt_{name}(u8* buffer, {_ARRAYS}, {_TABLE}) "
            f"{{ move_boxes<{packs}>(buffer, arrays, table); }}",
        )


def _of_type(dtype: DType) -> Iterator[tuple[str, str]]:
    """Yield names and texts of a type's functions."""
    item = _TYPES.get(dtype.name) or dtype.name.title().replace("Ui", "UI")
    for op in reductions(dtype):
        name = f"commrt_{op.name.lower()}_{dtype.name}"
        yield (
            name,
            f"{name}(void* dst, const void* src, u64 count) "
            f"{{ reduce<{_function(op, dtype)}<{item}>>(dst, src, count); }}",
        )
    name = f"commrt_boxes_{dtype.name}"
    cases = " ".join(
        f"case {int(op)}: return {_function(op, dtype)}<{item}>::apply(x, y);"
        for op in reductions(dtype)
    )
    bits = f"{item}::Bits"
    yield (
        name,
        f"{name}(const u8* buffer, {_ARRAYS}, {_TABLE}, u32 op) {{ "
        f"combine_boxes<{bits}>(buffer, arrays, table, [=]({bits} x, {bits} y) "
        f"-> {bits} {{ switch (op) {{ {cases} }} return x; }}); }}",
    )
    if ReduceOp.PREMUL_SUM in reductions(dtype):
        name = f"commrt_scaled_sum_{dtype.name}"
        yield (
            name,
            f"{name}(void* dst, const void* src, u64 count, u32 which, Factor factor) "
            f"{{ scaled_sum<{item}>(dst, src, count, which, factor); }}",
        )
    if dtype.kind in ("int", "uint"):
        name = f"commrt_divide_{dtype.name}"
        yield (
            name,
            f"{name}(void* dst, u64 count, i64 divisor) "
            f"{{ divide({item}{{}}, dst, count, divisor); }}",
        )


def _function(op: ReduceOp, dtype: DType) -> str:
    """Return the template that reduces: avg and premul_sum are the sum."""
    if dtype.kind == "bool":
        op = _OF_BOOL.get(op, op)
    if op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        op = ReduceOp.SUM
    return op.name.title()
