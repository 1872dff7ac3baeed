# SPDX-License-Identifier: Apache-2.0
"""Blocks, and a clock that goes on only when a block computes or a program waits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commrt.layers.out_of_core import OutOfCore, ThrottledCopy

MODES = ("keep", "swap", "recompute")
ENOUGH = 1 << 40


class Ticks:
    """A clock that programs move."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wait_until(self, then: float) -> None:
        self.at = max(self.at, then)


class _Backward(torch.autograd.Function):
    """The same, and the time of a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ticks: Ticks, seconds: float) -> Any:
        ctx.ticks, ctx.seconds = ticks, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.ticks.at += ctx.seconds
        return gradient, None, None


class Timed(nn.Module):
    """A block whose passes take given times."""

    def __init__(
        self, inner: nn.Module, ticks: Ticks, forward_s: float, backward_s: float
    ) -> None:
        super().__init__()
        self.inner, self.ticks = inner, ticks
        self.seconds = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> Any:
        self.ticks.at += self.seconds[0]
        return _Backward.apply(self.inner(x), self.ticks, self.seconds[1])


class Scaled(nn.Module):
    """Saves several tensors: integers, a view, and one that is not contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        order = x.detach().argsort(1)
        turned = x.t() * self.weight[:, None] * self.calls.detach()
        picked = turned.t().gather(1, order)
        half = picked[:, : x.shape[1] // 2]
        return torch.cat([half.exp().clamp(max=9.0), picked[:, half.shape[1] :]], 1)


def blocks_of(kind: str, seed: int = 1) -> tuple[nn.Sequential, torch.Tensor]:
    """Return blocks of a kind, and an input of them."""
    torch.manual_seed(seed)
    if kind == "mlp":
        sizes = [6, 9, 4, 8, 5]
        blocks = [
            nn.Sequential(nn.Linear(a, b), nn.Tanh())
            for a, b in itertools.pairwise(sizes)
        ]
        return nn.Sequential(*blocks).double(), torch.randn(7, 6).double()
    if kind == "dropout":
        blocks = [
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.ReLU()) for _ in range(4)
        ]
        return nn.Sequential(*blocks).double(), torch.randn(7, 6).double()
    if kind == "cnn":
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in ((1, 4), (4, 3), (3, 2))
        ]
        last = nn.Sequential(nn.Flatten(), nn.Linear(2 * 36, 5), nn.LogSoftmax(1))
        return nn.Sequential(*blocks, last).double(), torch.randn(5, 1, 6, 6).double()
    if kind == "in place":
        blocks = [
            nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
            for _ in range(3)
        ]
        return nn.Sequential(*blocks), torch.randn(3, 6)
    assert kind == "views"
    blocks = [nn.Sequential(Scaled(6), nn.Linear(6, 6)) for _ in range(3)]
    return nn.Sequential(*blocks).double(), torch.randn(4, 6).double()


KINDS = ("mlp", "dropout", "cnn", "in place", "views")


def results(model: Any, x: torch.Tensor, blocks: nn.Module, steps: int = 2) -> Any:
    """Return outputs, gradients, parameters and buffers of some steps of SGD."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        given = x.clone().requires_grad_()
        y = model(given)
        loss = y.square().sum()
        if isinstance(model, OutOfCore):
            model.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        found += [y.detach().clone(), given.grad]
        found += [p.grad.clone() for p in blocks.parameters()]
    found += [x.clone() for x in blocks.state_dict().values()]
    return [*found, torch.rand(3)]


def same_bits(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have the same bits."""
    return len(found) == len(right) and all(map(torch.equal, found, right))


OPENED: list[ThrottledCopy] = []
"""Far memories of ``made``, which tests close by ``close_opened``."""


def close_opened() -> None:
    """End the threads of far memories."""
    while OPENED:
        OPENED.pop().close()


def made(blocks: nn.Module, x: torch.Tensor, **given: Any) -> OutOfCore:
    """Return an OutOfCore over a quick link, whose clock is Ticks."""
    ticks = given.pop("ticks", None) or Ticks()
    far = given.pop("far", None)
    if far is None:
        far = ThrottledCopy(1e6, 1e-6, clock=ticks)
        OPENED.append(far)
    given.setdefault("budget_bytes", ENOUGH)
    return OutOfCore(copy.deepcopy(blocks), x, far=far, repeats=1, **given)


class Shared(Ticks):
    """A clock that copies of a model share."""

    def __deepcopy__(self, memo: Any) -> Shared:
        return self
