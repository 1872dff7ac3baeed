# SPDX-License-Identifier: Apache-2.0
"""Sums the gradients of weights over ranks that use the same weights.

Pattern: one ``allreduce`` of all of them as one flat array, in the backward pass.
Bytes: those of the weights.
"""

from __future__ import annotations

from typing import Any

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.differentiable_once import differentiable_once

__all__ = ["GradientSum", "check_sum", "summed_gradients"]


def check_sum(what: str, comm: Communicator | None) -> None:
    """Raise UsageError unless ``comm`` is a communicator or None."""
    if comm is not None and not isinstance(comm, Communicator):
        raise UsageError(
            f"{what}: sum_weight_gradients_over={shown(comm)} must be a communicator "
            f"of commrt, or None"
        )


class GradientSum:
    """A sum over ranks that has been started; ``wait()`` returns it.

    Args:
        gradients: this rank's; None stays None. They are not changed.
        comm: the ranks; None, or one rank, sums nothing.
    """

    def __init__(self, gradients: list[Any], comm: Communicator | None) -> None:
        self._gradients = gradients
        self._request: Any = None
        there = [each for each in gradients if each is not None]
        if comm is not None and comm.size > 1 and there:
            if len(there) == 1:  # straight from where it is: no copy
                given = there[0].reshape(-1)
                self._flat = torch.empty_like(given)
            else:
                given = self._flat = torch.cat([each.reshape(-1) for each in there])
            self._request = comm.allreduce(given, out=self._flat, nonblocking=True)

    def wait(self) -> list[Any]:
        """Return the sums, in the order and shapes of the gradients."""
        if self._request is None:
            return self._gradients
        self._request.wait()
        sizes = [0 if each is None else each.numel() for each in self._gradients]
        return [
            None if each is None else part.view(each.shape)
            for each, part in zip(self._gradients, self._flat.split(sizes), strict=True)
        ]


class _Summed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, comm: Communicator, *weights: Any) -> tuple[Any, ...]:
        ctx.comm = comm
        ctx.set_materialize_grads(True)
        return tuple(each.view_as(each) for each in weights)

    @staticmethod
    @differentiable_once("a spatial layer")
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return None, *GradientSum([*gradients], ctx.comm).wait()


def summed_gradients(
    weight: Any, bias: Any, comm: Communicator | None
) -> tuple[Any, Any]:
    """Return weight and bias, whose gradients are summed over the ranks of ``comm``.

    Both stay as they are where ``comm`` is None or has one rank. Weights must need
    gradients on all ranks or on none.
    """
    if comm is None or comm.size == 1:
        return weight, bias
    given = [each for each in (weight, bias) if each is not None]
    if not any(each.requires_grad for each in given):
        return weight, bias
    summed = iter(_Summed.apply(comm, *given))
    return next(summed) if weight is not None else None, next(summed, None)
