# SPDX-License-Identifier: Apache-2.0
"""The operations of NCCL: one table for the policy, ``explain`` and the docs.

``support(coll, dtype, reduction, version)`` says whether NCCL has the operation
(native), whether commrt composes it of others (composed), or why it is refused. Data
that only moves is bytes to NCCL, so types matter to reductions only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from commrt.errors import UsageError, shown
from commrt.nccl.features import NEWEST_KNOWN, feature, version_text
from commrt.vocabulary.dtypes import DTYPES, DType, ReduceOp, check_reduction
from commrt.vocabulary.operations import OPERATIONS, OpSpec, operation

__all__ = [
    "NCCL_REDUCTIONS",
    "NCCL_TYPES",
    "Support",
    "nccl_count",
    "operations_table",
    "reductions_table",
    "scalar_bytes",
    "support",
]

How = Literal["native", "composed", "refused"]

NCCL_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
    # Pairs of floats: what adds and scales them need not know that.
    "complex64": 7,
    "complex128": 8,
}
"""``ncclDataType_t`` of the types that NCCL reduces."""
NCCL_REDUCTIONS = {
    ReduceOp.SUM: 0,
    ReduceOp.PROD: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.AVG: 4,
    # Made for each call, by ncclRedOpCreatePreMulSum.
    ReduceOp.PREMUL_SUM: -1,
}
"""``ncclRedOp_t`` of the reductions that NCCL has."""

_FORMATS = {
    "int8": "<b",
    "uint8": "<B",
    "int32": "<i",
    "uint32": "<I",
    "int64": "<q",
    "uint64": "<Q",
    "float16": "<e",
    "float32": "<f",
    "float64": "<d",
    "complex64": "<f",
    "complex128": "<d",
}
"""Formats with which ``struct`` packs a factor, by element type."""

_COMPOSED = {
    "pairs": "grouped send and receive",
    "messages": "grouped send and receive",
    "reductions": "grouped reductions, one per block",
    "allreduce": "an allreduce of one byte",
}
"""Names of the parts of composed operations, by a row's ``nccl``."""
_LINEAR = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
_FLOAT8_CAPABILITY = 90


@dataclass(frozen=True)
class Support:
    """Way in which NCCL does an operation, or the reason why it does not."""

    how: How
    """``native``, ``composed`` or ``refused``."""
    reason: str
    """The calls it is composed of, or why it is refused; empty for native."""
    runs: bool = True
    """True if the library can run it. Some is refused though it could be run, because
    its result is not the one that commrt promises."""


def support(
    coll: str,
    dtype: DType,
    reduction: ReduceOp | None,
    version: int,
    *,
    capability: int | None = None,
) -> Support:
    """Return the support of NCCL ``version`` for ``coll``.

    Args:
        coll: the operation.
        dtype: of the elements.
        reduction: None where nothing is reduced.
        version: as ``ncclGetVersion`` counts.
        capability: the device's compute capability, 90 for 9.0; None: any.
    """
    spec = operation(coll)
    if spec.combines_some:
        return Support("refused", "NCCL has no prefix reductions", runs=False)
    if spec.nccl == "none":
        return Support("refused", f"NCCL has no {coll}", runs=False)
    if spec.reduces:
        assert reduction is not None, coll
        reason, runs = _why_not(dtype, reduction, version, capability)
        if reason:
            return Support("refused", reason, runs=runs)
    if spec.nccl == "pairs" and version >= feature("alltoall").since:
        return Support("native", "")
    if spec.nccl in _COMPOSED:
        return Support("composed", _COMPOSED[spec.nccl])
    return Support("native", "")


def _why_not(
    dtype: DType, reduction: ReduceOp, version: int, capability: int | None
) -> tuple[str, bool]:
    """Return why a reduction is refused, or nothing, and whether it would run."""
    if reduction not in NCCL_REDUCTIONS:
        kind = "bitwise" if reduction.name.startswith("B") else "logical"
        return f"NCCL has no {kind} reductions", False
    if dtype.name not in NCCL_TYPES:
        return f"NCCL does not reduce {dtype.name}", False
    if dtype.kind == "complex" and reduction not in _LINEAR:
        return (
            f"NCCL has no complex numbers, which {reduction.name.lower()} needs",
            False,
        )
    if _is_float8(dtype):
        since = feature("float8").since
        if version < since:
            return f"NCCL reduces {dtype.name} from {version_text(since)} on", False
        if capability is not None and capability < _FLOAT8_CAPABILITY:
            return (
                f"NCCL reduces {dtype.name} from compute capability 9.0 on, and this "
                f"device has {capability // 10}.{capability % 10}"
            ), False
        if reduction in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            return "NCCL rounds the factor to 8 bits", reduction == ReduceOp.AVG
    if dtype.kind == "float" and reduction in (ReduceOp.MIN, ReduceOp.MAX):
        return "NCCL's min and max drop NaN, and commrt's keep it", True
    return "", True


def _is_float8(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize == 1


def nccl_count(dtype: DType, count: int) -> int:
    """Return NCCL's number of elements for ``count`` of ``dtype`` in a reduction."""
    return 2 * count if dtype.kind == "complex" else count


def _cell(spec: OpSpec, version: int) -> str:
    if spec.combines_some or spec.nccl == "none":
        return "refused"
    if spec.nccl == "pairs" and version >= feature("alltoall").since:
        return "native"
    return "composed" if spec.nccl in _COMPOSED else "native"


def scalar_bytes(coll: str, factor: int | float | None, dtype: DType) -> bytes:
    """Return a factor in the memory format of ``dtype``, rounded to nearest.

    Raises UsageError for one that is missing or does not fit; ``coll`` is for messages.
    """
    if factor is None:
        raise UsageError(f"{coll}: op='premul_sum' needs factor=")
    try:
        if dtype.name == "bfloat16":
            bits = int.from_bytes(struct.pack("<f", factor), "little")
            if factor == factor:  # rounding would make a number of NaN
                bits += 0x7FFF + (bits >> 16 & 1)
            return struct.pack("<H", bits >> 16)
        return struct.pack(_FORMATS[dtype.name], factor)
    except (struct.error, OverflowError) as error:
        raise UsageError(
            f"factor={shown(factor)} does not fit into {dtype.name}: {error}"
        ) from None


def reductions_table() -> str:
    """Return NCCL's support for each reduction of each type, for the reference."""
    rows = ["| `op` | type | NCCL |", "|---|---|---|"]
    for op in ReduceOp:
        verdicts: dict[str, list[str]] = {}
        for dtype in DTYPES:
            try:
                check_reduction(op, dtype)
            except UsageError:
                continue
            found = support("allreduce", dtype, op, NEWEST_KNOWN)
            how = f"refused: {found.reason}" if found.reason else "native"
            how = how.replace(dtype.name, "it")
            since = feature("float8").since
            if found.how == "native" and _is_float8(dtype):
                how += f" from {version_text(since)} and compute capability 9.0 on"
            verdicts.setdefault(how, []).append(f"`{dtype.name}`")
        for how, names in verdicts.items():
            rows.append(f"| `{op.name.lower()}` | {', '.join(names)} | {how} |")
    return "\n".join(rows) + "\n"


def operations_table() -> str:
    """Return NCCL's support for each operation, for docs/reference/nccl.md."""
    since = feature("alltoall").since
    rows = [
        f"| operation | before {version_text(since)} | from {version_text(since)} on "
        f"| composed of |",
        "|---|---|---|---|",
    ]
    for spec in OPERATIONS:
        old, new = _cell(spec, since - 1), _cell(spec, since)
        of = _COMPOSED.get(spec.nccl, "") if "composed" in (old, new) else ""
        rows.append(f"| `{spec.name}` | {old} | {new} | {of} |")
    return "\n".join(rows) + "\n"
