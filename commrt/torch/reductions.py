# SPDX-License-Identifier: Apache-2.0
"""torch's ReduceOp as commrt's reductions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from commrt.torch.errors import wrong_call

__all__ = ["PLAIN", "Reduction", "reduction_of"]

_KINDS = dist.ReduceOp.RedOpType
_OBJECTS = (dist.ReduceOp, _KINDS)

_NAMES = {
    _KINDS.SUM: "sum",
    _KINDS.AVG: "avg",
    _KINDS.PRODUCT: "prod",
    _KINDS.MIN: "min",
    _KINDS.MAX: "max",
    _KINDS.BAND: "band",
    _KINDS.BOR: "bor",
    _KINDS.BXOR: "bxor",
    _KINDS.PREMUL_SUM: "premul_sum",
}
"""Names of commrt, by torch's kinds."""


class Reduction:
    """A reduction: its name, and a factor if it has one."""

    __slots__ = ("factor", "name")

    def __init__(self, name: str, factor: float | None = None) -> None:
        self.name = name
        self.factor = factor

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call of commrt."""
        if self.factor is None:
            return {"op": self.name}
        return {"op": self.name, "factor": self.factor}


_PLAIN = {
    hash(kind): Reduction(name) for kind, name in _NAMES.items() if name != "premul_sum"
}
"""Reductions by their numbers, which are torch's hashes: to compare kinds takes several
times as long."""
PLAIN = {number: reduction.name for number, reduction in _PLAIN.items()}
"""commrt's names of reductions without a factor, by torch's numbers."""


def reduction_of(op: Any) -> Reduction:
    """Return the reduction that torch calls ``op``; UsageError where there is none."""
    if isinstance(op, _OBJECTS):
        found = _PLAIN.get(hash(op))
        if found is not None:
            return found
    is_kind = isinstance(op, _KINDS)  # which torch also calls an instance of ReduceOp
    kind = op.op if isinstance(op, dist.ReduceOp) and not is_kind else op
    if kind != _KINDS.PREMUL_SUM:
        raise wrong_call(
            f"{op} is no reduction of commrt's; expected one of "
            f"{', '.join(sorted(each.name for each in _NAMES))}"
        )
    if is_kind:
        raise wrong_call("PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(0.5)")
    factor = op.factor
    if isinstance(factor, dist.torch.Tensor):
        if factor.numel() != 1:
            raise wrong_call(
                f"PREMUL_SUM has a factor of {factor.numel()} elements; expected one"
            )
        factor = factor.item()
    return Reduction("premul_sum", factor)
