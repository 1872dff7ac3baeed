# SPDX-License-Identifier: Apache-2.0
"""The parts that all losses of cut tensors share: arguments, and sums over ranks."""

from __future__ import annotations

from typing import Any

import torch

from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.elementwise import alike
from commrt.layers.tensors.moves import moved
from commrt.layers.tensors.placement import Placement
from commrt.layers.tensors.spatial import several

__all__ = ["check_call", "lying_as", "made", "of_one_rank", "on_grid"]

REDUCTIONS = ("none", "mean", "sum")


def check_call(
    what: str,
    x: Any,
    target: Any,
    reduction: Any,
    size_average: Any = None,
    reduce: Any = None,
) -> None:
    """Raise UsageError for a reduction that is none, or operands that do not fit."""
    if size_average is not None or reduce is not None:
        raise UsageError(
            f"{what}: size_average and reduce are not known here; use reduction="
        )
    if reduction not in REDUCTIONS:
        raise UsageError(
            f"{what}: reduction={shown(reduction)} must be one of "
            f"{', '.join(REDUCTIONS)}"
        )
    for name, value in (("input", x), ("target", target)):
        if not isinstance(value, DistTensor):
            raise UsageError(
                f"{what}: the {name} is no DistTensor, and the other operand is one: "
                f"make it one by DistTensor.from_whole"
            )
        if value.placement.partial:
            raise UsageError(
                f"{what}: the {name} {value} has parts on several ranks: "
                f"redistribute() it first"
            )
    if target.grid is not x.grid:
        raise UsageError(
            f"{what}: input and target lie on two grids, {x.grid} and {target.grid}"
        )


def lying_as(what: str, x: DistTensor, placement: Placement) -> DistTensor:
    """Return a tensor that lies so; one that is whole on every rank is cut."""
    if not x.placement.cut_axes:
        return x.redistribute(placement=placement)
    return alike(what, [(x, placement)])[0]


def on_grid(what: str, weight: Any, like: DistTensor) -> DistTensor:
    """Return a weight as a DistTensor; a plain one is whole on every rank."""
    if isinstance(weight, DistTensor):
        return weight
    if weight.requires_grad:
        raise UsageError(
            f"{what}: a weight that needs a gradient must be a DistTensor: make it one "
            f"by DistTensor.from_whole"
        )
    return DistTensor.from_whole(weight, like.grid, Placement.replicated(weight.dim()))


def made(
    losses: DistTensor,
    reduction: str,
    *,
    divisor: Any = None,
    num_wrong: int = 0,
    wrong: str = "",
) -> DistTensor:
    """Return losses as they are, or their sum or mean, which all ranks have.

    Args:
        losses: of elements or rows.
        reduction: "none", "mean" or "sum".
        divisor: this rank's part of what the sum is divided by; None: the elements.
        num_wrong: this rank's elements that are no valid input.
        wrong: what is said of them; "": there is nothing to say, nor to compare.

    Collective over the axes that cut the losses, unless there is nothing to reduce or
    compare. Raises UsageError on all ranks where an element of any rank is wrong.
    """
    grid, local = losses.grid, losses.local
    axes = several(losses, range(losses.dim()))
    if reduction == "none" and not wrong:
        return losses
    if divisor is None:
        divisor = local.numel()
    numbers = [
        local.sum().double(),
        torch.as_tensor(divisor, dtype=torch.float64, device=local.device),
        torch.tensor(num_wrong, dtype=torch.float64, device=local.device),
    ]
    packed = torch.stack(numbers)
    open_sums, whole = Placement(None, partial=axes), Placement(None)
    packed = moved(packed, grid, (3,), open_sums, whole)
    found = int(packed.detach()[2])
    if wrong and found:
        raise UsageError(wrong.format(number=found))
    if reduction == "none":
        return losses
    total = packed[0] if reduction == "sum" else packed[0] / packed[1]
    return DistTensor(total.to(local.dtype), (), grid, Placement())


def of_one_rank(
    loss: torch.Tensor, grid: ProcessGrid, placement: Placement
) -> DistTensor:
    """Return the loss that torch's own function gave on a grid of one rank.

    ``placement`` is that of losses which are not reduced; a number lies nowhere.
    """
    where = placement if loss.dim() == len(placement.dims) else Placement()
    return DistTensor(loss, loss.shape, grid, where)
