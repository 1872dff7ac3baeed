# SPDX-License-Identifier: Apache-2.0
"""What programs may write for a reduction: names of commrt and of other libraries.

This is the only place that turns ``op=`` into a reduction. Besides commrt's own names
it knows words (``"SUM"``, ``"mean"``), functions (``np.add``, ``max``), mpi4py's
``MPI.SUM`` and torch's ``ReduceOp.SUM``. No library is imported for it.
"""

from __future__ import annotations

import builtins
import operator
import sys
from typing import Any

import numpy as np

from commrt.errors import UsageError, shown, suggest
from commrt.vocabulary.dtypes import ReduceOp

__all__ = ["is_known", "reduce_op", "reduction_word"]

_OWN = {op.name.lower(): op for op in ReduceOp}
_OTHER_WORDS = {
    "add": ReduceOp.SUM,
    "mean": ReduceOp.AVG,
    "average": ReduceOp.AVG,
    "product": ReduceOp.PROD,
    "multiply": ReduceOp.PROD,
    "mul": ReduceOp.PROD,
    "minimum": ReduceOp.MIN,
    "amin": ReduceOp.MIN,
    "maximum": ReduceOp.MAX,
    "amax": ReduceOp.MAX,
    "all": ReduceOp.LAND,
    "any": ReduceOp.LOR,
    "logical_and": ReduceOp.LAND,
    "logical_or": ReduceOp.LOR,
    "logical_xor": ReduceOp.LXOR,
    "bitwise_and": ReduceOp.BAND,
    "bitwise_or": ReduceOp.BOR,
    "bitwise_xor": ReduceOp.BXOR,
}
_WORDS = {**_OTHER_WORDS, **_OWN}
_SUGGESTED = {"+": "sum", "*": "prod", "&": "band", "|": "bor", "^": "bxor"}
_OPERATORS = {
    "add": ReduceOp.SUM,
    "mul": ReduceOp.PROD,
    "and_": ReduceOp.BAND,
    "or_": ReduceOp.BOR,
    "xor": ReduceOp.BXOR,
}
_LIBRARIES = ("torch", "cupy", "jax.numpy")
"""Libraries whose functions have numpy's names."""


def _functions() -> dict[int, tuple[Any, ReduceOp]]:
    """Return the functions that stand for a reduction, by their identity."""
    found = [
        (getattr(library, word), op)
        for library in (builtins, np)
        for word, op in _WORDS.items()
        if callable(getattr(library, word, None))
    ]
    found += [(getattr(operator, word), op) for word, op in _OPERATORS.items()]
    return {id(each): (each, op) for each, op in found}


_FUNCTIONS = _functions()
_OF_ARRAYS = ("__dlpack__", "__cuda_array_interface__", "nbytes")
"""Attributes of classes of arrays."""


def reduce_op(op: Any) -> ReduceOp:
    """Return the reduction that a program calls ``op``, or raise UsageError."""
    if isinstance(op, str):
        found = _WORDS.get(op.lower())
        if found is None:
            hint = suggest(op, _OWN, _SUGGESTED)
            raise UsageError(f"unknown reduction op={shown(op)}{hint}")
        return found
    known = _FUNCTIONS.get(id(op))
    found = known[1] if known else _of_library(op)
    if found is None:
        raise UsageError(f"unknown reduction op={shown(op)}{_way_out(op)}")
    return found


def reduction_word(op: Any) -> Any:
    """Return commrt's name of a reduction; what is none of its own as it is."""
    try:
        return reduce_op(op).name.lower()
    except UsageError:
        return op


def is_known(op: str) -> bool:
    """Return whether ``op`` is the name of one of commrt's reductions."""
    return op in _OWN


def _of_library(op: Any) -> ReduceOp | None:
    """Return the reduction that an object of another library stands for."""
    kind = type(op)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and kind is mpi.Op:
        return next((own for own in ReduceOp if op == _named(mpi, own.name)), None)
    if str(kind.__module__).startswith("torch."):
        return _of_torch(op)
    for library in _LIBRARIES:
        module = sys.modules.get(library)
        for word, own in _WORDS.items() if module is not None else ():
            if op is getattr(module, word, None) and callable(op):
                return own
    return None


def _named(library: Any, name: str) -> Any:
    return getattr(library, name, None)


def _of_torch(op: Any) -> ReduceOp | None:
    """Return what torch.distributed's ReduceOp stands for; it may have a factor."""
    kind: Any = op if type(op).__name__ == "RedOpType" else getattr(op, "op", None)
    if type(kind).__name__ != "RedOpType":
        return None
    found = _WORDS.get(str(kind.name).lower())
    if found is ReduceOp.PREMUL_SUM and kind is not op:
        raise UsageError(
            "op is torch's PREMUL_SUM with a factor inside: pass op='premul_sum' and "
            "factor="
        )
    return found


def _way_out(op: Any) -> str:
    known = f"Known: {', '.join(sorted(_OWN))}."
    is_array = any(hasattr(type(op), each) for each in _OF_ARRAYS)
    if is_array and not isinstance(op, np.generic):
        return f" is an array: pass it by keyword, as out=. {known}"
    if callable(op) and not isinstance(op, type):
        return f": a function of your own is passed as commrt.reduction(fn). {known}"
    return (
        f": expected a name, or what numpy, mpi4py or torch call such a reduction. "
        f"{known}"
    )
