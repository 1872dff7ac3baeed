# SPDX-License-Identifier: Apache-2.0
"""Stacked perceptrons on tokens that are sorted by expert, as one function of torch.

Each expert's products are written to their rows of one result, and its weights'
gradients to their place in the stack. So no piece is copied. Outputs have the bits of a
loop over experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from commrt.layers.differentiable_once import differentiable_once

__all__ = ["stacked_mlp"]

Tensor: TypeAlias = torch.Tensor


def stacked_mlp(
    x: Tensor, counts: Sequence[int], activation: str, weights: Sequence[Tensor]
) -> Tensor:
    """Return the outputs (n, d_model) of experts; differentiable once and local.

    Args:
        x: (n, d_model), the tokens of the first expert, then of the second one, and so
            on.
        counts: the tokens of each expert; n together.
        activation: "swiglu", "gelu" or "relu".
        weights: ``gate`` (with "swiglu"), ``up`` and ``down``, each of
            (experts, d_hidden, d_model) and of the type of ``x``.
    """
    result: Tensor = _Stacked.apply(x, tuple(counts), activation, *weights)
    return result


class _Stacked(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: tuple[int, ...], activation: str, *weights: Tensor
    ) -> Tensor:
        *gates, down = weights  # what is multiplied first, and last
        inner = [_products(x, weight.mT, counts) for weight in gates]
        hidden = _activated(activation, inner, counts)
        ctx.counts, ctx.activation, ctx.num_weights = counts, activation, len(weights)
        ctx.save_for_backward(x, hidden, *inner, *weights)
        return _products(hidden, down, counts)

    @staticmethod
    @differentiable_once("a mixture of experts")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, *others = ctx.saved_tensors
        inner = others[: ctx.num_weights - 1]
        *gates, down = others[ctx.num_weights - 1 :]
        counts = ctx.counts
        of_x, _, _, *of_gates, of_down = ctx.needs_input_grad
        found: list[Tensor | None] = []
        summed = None
        if of_x or any(of_gates):
            of_hidden = _products(gradient, down.mT, counts)
            of_inner = _through(ctx.activation, of_hidden, inner)
            for each, weight, is_wanted in zip(of_inner, gates, of_gates, strict=True):
                found.append(_outer(each, x, counts) if is_wanted else None)
                if of_x:
                    summed = _products(each, weight, counts, summed)
        else:
            found += [None] * len(gates)
        found.append(_outer(hidden, gradient, counts) if of_down else None)
        return summed, None, None, *found


def _products(
    x: Tensor, weights: Tensor, counts: Sequence[int], total: Tensor | None = None
) -> Tensor:
    """Return the rows (n, a) of experts times the experts' (a, b); added to a total."""
    out = total
    if out is None:
        out = x.new_empty((len(x), weights.shape[2]))
    parts = zip(x.split([*counts]), weights.unbind(), out.split([*counts]), strict=True)
    for rows, weight, place in parts:
        if total is None:
            torch.mm(rows, weight, out=place)
        else:
            place.addmm_(rows, weight)
    return out


def _outer(x: Tensor, y: Tensor, counts: Sequence[int]) -> Tensor:
    """Return x^T y (experts, a, b) of each expert's rows (n, a) and (n, b)."""
    out = x.new_empty((len(counts), x.shape[1], y.shape[1]))
    parts = zip(x.split([*counts]), y.split([*counts]), out.unbind(), strict=True)
    for left, right, place in parts:
        torch.mm(left.mT, right, out=place)
    return out


def _activated(
    activation: str, inner: Sequence[Tensor], counts: Sequence[int]
) -> Tensor:
    """Return the activation of each expert's rows.

    One call for all rows would have other bits: the last elements of a call, too few
    for the processor's vectors, are computed by another function.
    """
    aten = torch.ops.aten
    out = torch.empty_like(inner[0])
    pieces = zip(*(each.split([*counts]) for each in (out, *inner)), strict=True)
    for place, *given in pieces:
        if activation == "swiglu":
            gate, up = given
            aten.silu.out(gate, out=place)
            place.mul_(up)
        elif activation == "gelu":
            aten.gelu.out(*given, out=place)
        else:
            torch.clamp(*given, min=0, out=place)
    return out


def _through(
    activation: str, gradient: Tensor, inner: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of what the activation has taken; writes over ``gradient``.

    Fresh memory of this size costs more than the arithmetic.
    """
    aten = torch.ops.aten
    if activation == "gelu":
        aten.gelu_backward.grad_input(gradient, inner[0], grad_input=gradient)
        return [gradient]
    if activation == "relu":
        aten.threshold_backward.grad_input(gradient, inner[0], 0, grad_input=gradient)
        return [gradient]
    gate, up = inner
    of_gate = gradient * up
    aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
    return [of_gate, gradient.mul_(functional.silu(gate))]
