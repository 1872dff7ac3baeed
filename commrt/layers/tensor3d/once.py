# SPDX-License-Identifier: Apache-2.0
"""Marks on gradients that have been summed over ranks, so that none is summed twice.

The mark is an attribute of the gradient. It goes with the gradient when an optimizer's
``zero_grad()`` drops it, and stays when a backward pass adds to it. So the sum of a
summed gradient and a new one is refused, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TypeAlias

import torch

from commrt.errors import UsageError

__all__ = ["mark_summed", "refuse_summed"]

Tensor: TypeAlias = torch.Tensor


def refuse_summed(what: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UsageError where a parameter's gradient has been summed before; local.

    One of zeros may be: ``zero_grad(set_to_none=False)`` has left it so, and nothing
    was added since, as to an expert without tokens.
    """
    for name, parameter in named:
        summed = parameter.grad
        if getattr(summed, "is_summed", False) and bool(summed.any()):
            raise UsageError(
                f"{what}: the gradient of {name} has been summed over ranks before; "
                f"summed again it would count some ranks twice. Call "
                f"{what} once after backward(), and the optimizer's zero_grad() before "
                f"the next backward()"
            )


def mark_summed(named: Iterable[tuple[str, Tensor]]) -> None:
    """Note on each gradient that it has been summed."""
    for _, parameter in named:
        if parameter.grad is None:
            continue
        parameter.grad.is_summed = True
        if not getattr(parameter, "is_watched", False):
            parameter.register_hook(_ForgetZeros(parameter))
            parameter.is_watched = True


class _ForgetZeros:
    """Takes the mark off a gradient of zeros, before a backward pass adds to it.

    ``zero_grad(set_to_none=False)`` keeps the tensor, and with it the mark.
    """

    def __init__(self, parameter: Tensor) -> None:
        # Weakly: the parameter has this hook, and is freed without a cycle.
        self._parameter = weakref.ref(parameter)

    def __call__(self, gradient: Tensor) -> None:
        parameter = self._parameter()
        summed = None if parameter is None else parameter.grad
        if summed is None or not getattr(summed, "is_summed", False):
            return
        if not bool(summed.any()):
            summed.is_summed = False
