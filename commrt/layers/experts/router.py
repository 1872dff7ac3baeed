# SPDX-License-Identifier: Apache-2.0
"""The router: which experts each token goes to, and with what weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Choice", "Router"]

Tensor: TypeAlias = torch.Tensor


class Choice(NamedTuple):
    """The experts that a router has chosen for tokens."""

    experts: Tensor
    """(tokens, k), int64: the chosen experts' numbers, the likeliest first."""
    weights: Tensor
    """(tokens, k): what their outputs are multiplied by."""
    probabilities: Tensor
    """(tokens, experts): the softmax."""
    logits: Tensor
    """(tokens, experts)."""


class Router(nn.Module):  # type: ignore[misc]
    """Softmax over experts, of which the k largest are taken; local.

    Equally likely experts are taken in the order of their numbers. The softmax of
    float16 and bfloat16 is computed in float32 (Fedus et al., "Switch Transformers",
    section 2.4).

    Args:
        d_model: features of a token.
        num_experts: experts to choose from.
        top_k: experts for each token.
        normalize: True: a token's k weights are divided by their sum.
        generator: draws the weight, as torch's Linear does.
        device, dtype: of the weight.

    Parameter: ``weight`` of (experts, d_model).
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        normalize: bool = False,
        generator: torch.Generator | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        weight = torch.empty((num_experts, d_model), dtype=dtype)
        bound = 1.0 / math.sqrt(max(d_model, 1))
        nn.init.uniform_(weight, -bound, bound, generator=generator)
        self.weight = nn.Parameter(weight.to(device))

    def forward(self, x: Tensor) -> Choice:
        """Return the choice for tokens (tokens, d_model)."""
        logits = functional.linear(x, self.weight)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        probabilities = logits.softmax(-1)
        # Not topk, which does not say which of two equal ones it takes.
        ordered, experts = probabilities.sort(dim=-1, descending=True, stable=True)
        weights = ordered[:, : self.top_k]
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        return Choice(experts[:, : self.top_k], weights, probabilities, logits)

    def extra_repr(self) -> str:
        """Return the router's sizes, for ``print(model)``."""
        num_experts, d_model = self.weight.shape
        return f"{d_model}, experts={num_experts}, top_k={self.top_k}"
