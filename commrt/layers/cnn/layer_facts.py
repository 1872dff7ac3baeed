# SPDX-License-Identifier: Apache-2.0
"""Shapes of a network's layers, found by a run that computes and stores nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from commrt.errors import UsageError
from commrt.layers.cnn.known_modules import WITH_BATCH_STATISTICS, takes_channels

__all__ = ["LayerFacts", "facts_of", "facts_of_call", "run_without_memory"]


@dataclass(frozen=True)
class LayerFacts:
    """One call of a module without children, in the order of calls."""

    path: str
    input: tuple[int, ...]
    """Shape of the whole input."""
    output: tuple[int, ...]
    """Shape of the whole output."""
    reach: tuple[int, ...]
    """Rows of other pieces that a piece's outputs read, for each spatial dimension."""
    weights: int
    """Elements of its parameters."""
    flops: float
    """Multiplications and additions of a training step: the output, and gradients of
    input and weight."""
    is_product: bool
    has_statistics: bool
    is_kept: bool
    """True if the backward pass needs the output, as that of most layers."""


def facts_of(model: nn.Module, shape: Sequence[int]) -> list[LayerFacts]:
    """Return the calls of a model's leaves for an input of a whole shape.

    Runs the model on tensors without memory. Raises UsageError where it cannot.
    """
    found: list[LayerFacts] = []
    hooks = []
    for path, module in model.named_modules():
        if not [*module.children()]:

            def keep(m: Any, args: Any, y: Any, path: str = path) -> None:
                found.append(facts_of_call(path, m, args[0], y))

            hooks.append(module.register_forward_hook(keep))
    try:
        run_without_memory(model, shape)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def run_without_memory(
    model: nn.Module, shape: Sequence[int], begin: Callable[[Any], Any] | None = None
) -> None:
    """Run a model on tensors of no memory, for an input of a whole shape.

    ``begin`` is called with the input. Raises UsageError where the model cannot run.
    """
    state = {
        name: torch.empty_like(each, device="meta")
        for name, each in (*model.named_parameters(), *model.named_buffers())
    }
    try:
        with torch.no_grad():
            x = torch.empty(tuple(shape), device="meta")
            if begin is not None:
                begin(x)
            functional_call(model, state, (x,))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"parallelize_cnn: strategy='auto': the model does not run on an input of "
            f"shape {tuple(shape)}: {error}; pass the whole input's shape as example"
        ) from error


def facts_of_call(path: str, module: nn.Module, x: Any, y: Any) -> LayerFacts:
    """Return the facts of one call."""
    weights = sum(each.numel() for each in module.parameters())
    is_product = takes_channels(module)
    flops = 5.0 * y.numel()
    if isinstance(module, nn.Linear):
        flops = 6.0 * y.numel() * module.in_features
    elif is_product:
        transposed = isinstance(
            module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
        )
        weight: Any = module.weight
        rows = x.numel() if transposed else y.numel()
        flops = 6.0 * rows * math.prod(weight.shape[1:])
    return LayerFacts(
        *(path, tuple(x.shape), tuple(y.shape), _reach(module, x.dim() - 2)),
        *(weights, flops, is_product, isinstance(module, WITH_BATCH_STATISTICS)),
        not isinstance(module, nn.Flatten | nn.Identity),
    )


def _reach(module: Any, dims: int) -> tuple[int, ...]:
    """Return how many rows of others the windows of a piece read, both sides."""
    kernel = getattr(module, "kernel_size", None)
    if kernel is None or dims < 1:
        return ()

    def each(value: Any) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, tuple) else (value,) * dims

    steps = zip(
        each(kernel),
        each(getattr(module, "dilation", 1)),
        each(module.stride),
        strict=True,
    )
    return tuple(max(0, (k - 1) * d + 1 - s) for k, d, s in steps)
