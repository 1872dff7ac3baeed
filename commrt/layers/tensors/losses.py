# SPDX-License-Identifier: Apache-2.0
"""torch's losses of elements, of tensors that are cut.

    loss = functional.mse_loss(network(x), target)  # DistTensors that lie alike
    loss.backward()                                 # all ranks have the whole loss

Each rank computes the losses of its elements. A sum or mean is made at once, so that
all ranks have the number; ``reduction="none"`` returns losses that are cut as the
input is. The target lies as the input does, or is whole on every rank. Weights are
plain tensors that all ranks have, or DistTensors.

Pattern: one ``allreduce`` of 24 bytes over the axes that cut the input. The backward
pass sends nothing, unless a target or weight that is whole needs a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.elementwise import of_elements
from commrt.layers.tensors.loss_reductions import (
    check_call,
    lying_as,
    made,
    of_one_rank,
    on_grid,
)
from commrt.layers.tensors.rules import takes

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
]

Tensor: TypeAlias = torch.Tensor


# -- losses of elements ----------------------------------------------------------------


def _of_elements(
    what: str,
    function: Callable[..., Tensor],
    input: Any,
    target: Any,
    *,
    reduction: str,
    weights: dict[str, Any],
    more: dict[str, Any],
    by_weights: bool = False,
    is_probability: bool = False,
) -> DistTensor:
    """Return a loss of elements.

    Args:
        what: the function's name.
        function: torch's, which takes weights by name.
        input, target: DistTensors of one shape.
        reduction: "none", "mean" or "sum".
        weights: by name; None or of a shape that spreads over the input's.
        more: arguments that are no tensors.
        by_weights: whether a mean is divided by the sum of the weight.
        is_probability: whether inputs and targets must be from 0 to 1.
    """
    if target.shape != input.shape:
        raise UsageError(
            f"{what}: input of shape {tuple(input.shape)} and target of shape "
            f"{tuple(target.shape)}: expected one shape, of which nothing is spread"
        )
    given = {
        name: on_grid(what, weight, input)
        for name, weight in weights.items()
        if weight is not None
    }
    target = lying_as(what, target, input.placement)
    for name, weight in given.items():
        _check_spreads(what, name, weight, input.shape, is_whole=by_weights)
    num_wrong, wrong = 0, ""
    if is_probability:
        num_wrong = _count_outside(input.local) + _count_outside(target.local)
        wrong = f"{what}: {{number}} elements of input or target are not from 0 to 1"
    if input.grid.num_ranks == 1 and not num_wrong:
        parts = {name: weight.local for name, weight in given.items()}
        local = function(
            input.local, target.local, **parts, **more, reduction=reduction
        )
        return of_one_rank(local, input.grid, input.placement)

    def losses_of(x: Tensor, y: Tensor, *parts: Tensor) -> Tensor:
        if num_wrong:
            return x * 0.0
        named = dict(zip(given, parts, strict=True))
        return function(x, y, **named, **more, reduction="none")

    losses = of_elements(what, losses_of, input, target, *given.values())
    divisor = None
    if by_weights and given and reduction == "mean":
        divisor = lying_as(what, given["weight"], losses.placement).local.sum()
    return made(losses, reduction, divisor=divisor, num_wrong=num_wrong, wrong=wrong)


def _check_spreads(
    what: str, name: str, weight: DistTensor, shape: torch.Size, *, is_whole: bool
) -> None:
    """Raise UsageError unless a weight's shape is the input's, or spreads over it."""
    fits = weight.shape == shape
    if not is_whole and not fits and weight.dim() <= len(shape):
        own = shape[len(shape) - weight.dim() :]
        fits = all(a in (1, b) for a, b in zip(weight.shape, own, strict=True))
    if not fits:
        raise UsageError(
            f"{what}: {name} of shape {tuple(weight.shape)} does not fit the input's "
            f"shape {tuple(shape)}"
        )


def _count_outside(x: Tensor) -> int:
    """Return how many elements are not from 0 to 1."""
    found = x.detach()
    inside = (found >= 0) & (found <= 1)
    return int(inside.numel() - inside.sum())


def _mean_squared(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
    *,
    what: str,
    function: Callable[..., Tensor],
) -> DistTensor:
    """Return mse_loss or l1_loss; a weighted mean is over the sum of the weight."""
    check_call(what, input, target, reduction, size_average, reduce)
    return _of_elements(
        *(what, function, input, target),
        reduction=reduction,
        weights={"weight": weight},
        more={},
        by_weights=True,
    )


mse_loss = partial(_mean_squared, what="mse_loss", function=functional.mse_loss)
l1_loss = partial(_mean_squared, what="l1_loss", function=functional.l1_loss)
takes(functional.mse_loss)(mse_loss)
takes(functional.l1_loss)(l1_loss)


@takes(functional.smooth_l1_loss)
def smooth_l1_loss(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> DistTensor:
    """Return torch's smooth_l1_loss."""
    check_call("smooth_l1_loss", input, target, reduction, size_average, reduce)
    return _of_elements(
        *("smooth_l1_loss", functional.smooth_l1_loss, input, target),
        reduction=reduction,
        weights={},
        more={"beta": beta},
    )


@takes(functional.huber_loss)
def huber_loss(
    input: Any,
    target: Any,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Any = None,
) -> DistTensor:
    """Return torch's huber_loss, whose mean is over all elements, weighted or not."""
    check_call("huber_loss", input, target, reduction)
    return _of_elements(
        *("huber_loss", functional.huber_loss, input, target),
        reduction=reduction,
        weights={"weight": weight},
        more={"delta": delta},
    )


@takes(functional.binary_cross_entropy)
def binary_cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> DistTensor:
    """Return torch's binary_cross_entropy; elements must be from 0 to 1."""
    check_call("binary_cross_entropy", input, target, reduction, size_average, reduce)
    return _of_elements(
        *("binary_cross_entropy", functional.binary_cross_entropy, input, target),
        reduction=reduction,
        weights={"weight": weight},
        more={},
        is_probability=True,
    )


@takes(functional.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> DistTensor:
    """Return torch's binary_cross_entropy_with_logits."""
    what = "binary_cross_entropy_with_logits"
    check_call(what, input, target, reduction, size_average, reduce)
    return _of_elements(
        *(what, functional.binary_cross_entropy_with_logits, input, target),
        reduction=reduction,
        weights={"weight": weight, "pos_weight": pos_weight},
        more={},
    )
