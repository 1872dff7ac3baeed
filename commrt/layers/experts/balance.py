# SPDX-License-Identifier: Apache-2.0
"""How evenly tokens of all ranks are spread: counts, capacity and the router's losses.

All of it is of the tokens of all ranks along ``data`` and ``expert``, so it is the same
for every grid. Tokens are in the order of these ranks, ``data`` the slower one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from commrt.comm import Communicator
from commrt.layers.experts.router import Choice
from commrt.layers.tensor3d.roles import Along

__all__ = ["Load", "RouterLosses", "capacity_of", "kept", "router_losses"]

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, eq=False)
class Load:
    """How many tokens chose each expert.

    Args:
        own: (experts,), int64: of this rank.
        before: of the ranks whose tokens come before this rank's.
        total: of all ranks.
        num_tokens: tokens of all ranks.
    """

    own: Tensor
    before: Tensor
    total: Tensor
    num_tokens: int

    @classmethod
    def of(cls, experts: Tensor, num_experts: int, tokens: Along) -> Load:
        """Return the load of all ranks; collective over ``tokens``.

        Args:
            experts: (tokens, k): the experts of this rank's tokens.
            num_experts: the number of experts.
            tokens: the ranks that have other tokens.

        Bytes: an ``allgather`` of 8 for each expert.
        """
        own = torch.bincount(experts.reshape(-1), minlength=num_experts).cpu()
        every = own[None]
        if tokens.comm is not None:
            gathered = np.empty((tokens.size, num_experts), np.int64)
            tokens.comm.allgather(own.numpy(), out=gathered)
            every = torch.from_numpy(gathered)
        total = every.sum(0)
        before = every[: tokens.place].sum(0)
        return cls(own, before, total, int(total.sum()) // experts.shape[1])


def capacity_of(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return the tokens that an expert takes: the mean, times the factor, rounded up.

    Source: Lepikhin et al., "GShard", section 2.2.
    """
    return math.ceil(factor * top_k * num_tokens / num_experts)


def kept(experts: Tensor, load: Load, capacity: int) -> Tensor:
    """Return which choices are kept where experts take a number of tokens; local.

    An expert keeps the first ``capacity`` tokens that choose it, in the order of the
    tokens of all ranks.

    Args:
        experts: (tokens, k).

    Returns (tokens, k), bool.
    """
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)  # by expert, then by token
    own = load.own.to(flat.device)
    first = own.cumsum(0) - own
    place = torch.empty_like(flat)
    ordered = flat[order]
    place[order] = torch.arange(len(flat), device=flat.device) - first[ordered]
    place += load.before.to(flat.device)[flat]
    return (place < capacity).view(experts.shape)


class RouterLosses(NamedTuple):
    """Losses of a router, over the tokens of all ranks."""

    balance: Tensor
    """The load-balancing loss; 1 where experts are chosen evenly."""
    z: Tensor
    """The mean square of the logits' logarithm of sums of exponentials."""


def router_losses(choice: Choice, load: Load, tokens: Along) -> RouterLosses:
    """Return a router's losses, the same on all ranks; differentiable, collective.

    For E experts, T tokens of all ranks and c_e choices of the expert e among all k T,
    the load-balancing loss is E times the sum over e of c_e / (k T) times the mean
    probability of e (Fedus et al., "Switch Transformers", section 2.2, for any k). The
    z-loss is the mean of logsumexp(logits)^2 (Zoph et al., "ST-MoE", section 3.3).
    Choices count before any is dropped.

    A rank's backward pass gives the gradient of the sum of all ranks' losses: each rank
    adds the loss to its own, and ``sync_gradients`` takes the mean.

    Bytes: an ``allreduce`` of E + 1 elements, forward, and again backward.
    """
    num_experts = choice.probabilities.shape[1]
    squares = choice.logits.logsumexp(-1).square()
    sums = torch.cat([choice.probabilities.sum(0), squares.sum()[None]])
    if tokens.comm is not None:
        sums = _SumOverRanks.apply(sums, tokens.comm)
    num_tokens = max(load.num_tokens, 1)
    choices = num_tokens * choice.experts.shape[1]
    part = load.total.to(sums.device, sums.dtype) / choices
    balance = num_experts * (part * (sums[:-1] / num_tokens)).sum()
    return RouterLosses(balance, sums[-1] / num_tokens)


class _SumOverRanks(torch.autograd.Function):  # type: ignore[misc]
    """The sum over ranks, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        total = x.detach().clone()
        comm.allreduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(gradient.contiguous(), ctx.comm), None
