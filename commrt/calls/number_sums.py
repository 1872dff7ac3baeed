# SPDX-License-Identifier: Apache-2.0
"""Reductions of one number of each rank, by Python's arithmetic or by numpy's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from commrt.errors import ReductionError
from commrt.vocabulary.dtypes import ReduceOp
from commrt.vocabulary.reductions import Reduction

__all__ = ["array_of_numbers", "reduced", "reduced_by"]

_KINDS: tuple[type, ...] = (bool, int, float, complex)
"""Python's types of numbers, each wider than those before."""
_Combine = Callable[[Any, Any], Any]


def array_of_numbers(values: Sequence[Any]) -> Any:
    """Return an array of numbers, of the widest of their types."""
    return np.array(values, _common_type(values))


def reduced(values: Sequence[Any], op: ReduceOp) -> Any:
    """Return the reduction of numbers, from the left, of the widest of their types."""
    kinds = {*map(type, values)}
    if not kinds <= {*_KINDS}:
        return _reduced_by_numpy(values, op)
    kind = next(each for each in reversed(_KINDS) if each in kinds)
    if len(kinds) > 1:
        values = [kind(value) for value in values]
    total = reduce(_combine(op, kind is bool), values)
    if op is ReduceOp.AVG:
        return total / len(values)
    return kind(bool(total) if op in _LOGICAL else total)


def reduced_by(user: Reduction, values: Sequence[Any], name: str) -> Any:
    """Return what a reduction of the user's own makes of numbers."""
    dtype = user.dtype or _common_type(values)
    arrays = [np.array([value], dtype) for value in values]
    try:
        found = np.asarray(reduce(user, arrays))[0]
    except Exception as error:
        raise ReductionError(
            f"{name}: the reduction {user.name} raised {type(error).__name__}: {error}"
        ) from error
    return found if _has_scalars(values) else found.item()


def _has_scalars(values: Sequence[Any]) -> bool:
    return any(isinstance(value, np.generic) for value in values)


def _common_type(values: Sequence[Any]) -> np.dtype[Any]:
    if _has_scalars(values):
        return np.result_type(*values)
    widest = max(values, key=lambda value: _KINDS.index(type(value)))
    return np.dtype(type(widest))


def _reduced_by_numpy(values: Sequence[Any], op: ReduceOp) -> Any:
    """Return the reduction in numpy's type: integers wrap, as in arrays."""
    dtype = _common_type(values)
    is_short = dtype.kind not in "biuc" and dtype.itemsize < 4
    wide: Callable[[Any], Any] = np.float32 if is_short else dtype.type
    with np.errstate(all="ignore"):
        total = reduce(_combine(op, dtype.kind == "b"), map(wide, values))
        if op in _LOGICAL:
            total = bool(total)
        if op is ReduceOp.AVG and dtype.kind in "iu":  # toward zero
            sign = -1 if total < 0 else 1
            total = abs(int(total)) // len(values) * sign
        elif op is ReduceOp.AVG:
            total = total / len(values)
        return dtype.type(total)


def _least(a: Any, b: Any) -> Any:
    return a if a != a or not (b < a or b != b) else b


def _largest(a: Any, b: Any) -> Any:
    return a if a != a or not (b > a or b != b) else b


def _combine(op: ReduceOp, of_bools: bool) -> _Combine:
    return _COMBINE[_OF_BOOLS.get(op, op) if of_bools else op]


_COMBINE: dict[ReduceOp, _Combine] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PREMUL_SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PROD: operator.mul,
    ReduceOp.MIN: _least,
    ReduceOp.MAX: _largest,
    ReduceOp.LAND: lambda a, b: bool(a) and bool(b),
    ReduceOp.LOR: lambda a, b: bool(a) or bool(b),
    ReduceOp.LXOR: lambda a, b: bool(a) != bool(b),
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
_OF_BOOLS = {ReduceOp.SUM: ReduceOp.LOR, ReduceOp.PROD: ReduceOp.LAND}
_LOGICAL = (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR)
