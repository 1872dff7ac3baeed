# SPDX-License-Identifier: Apache-2.0
"""Reductions: hvd.Average, hvd.Sum and the others."""

from __future__ import annotations

from enum import Enum

from commrt.errors import UsageError, shown
from commrt.hvd.adasum import Adasum as AdasumTransfer
from commrt.hvd.transfers import AVERAGE

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "reduction_of",
]


class ReduceOp(Enum):
    """A reduction; its value is the name that signatures have."""

    AVERAGE = AVERAGE
    SUM = "sum"
    ADASUM = AdasumTransfer.name
    MIN = "min"
    MAX = "max"
    PRODUCT = "prod"

    @property
    def is_linear(self) -> bool:
        """True if its gradient is known: it is a sum, but for a factor."""
        return self in (ReduceOp.AVERAGE, ReduceOp.SUM)


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def reduction_of(what: str, op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the reduction of a call, which may give Horovod's old ``average``."""
    if average is not None:
        if op is not None:
            raise UsageError(
                f"{what}: average={shown(average)} is the old name of op=hvd.Average "
                f"or hvd.Sum; give op alone"
            )
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise UsageError(
            f"{what}: op={shown(op)} must be hvd.Average, Sum, Adasum, Min, Max or "
            f"Product"
        )
    return op
