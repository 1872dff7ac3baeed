# SPDX-License-Identifier: Apache-2.0
"""What the programs of ``tests/clients`` train, and the same training in one process.

Every program has the same small model, the same batches and the same optimizer, of
which a rank takes its part of the rows. So the mean of the ranks' losses is the loss of
the whole batch, and must be, in each step, that of ``alone``: one process, torch only.
The optimizer is SGD with momentum, for which gradients too large by a factor are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

STEPS = 6
ROWS = 16
"""In a batch of all ranks; 1, 2 and 4 ranks share them evenly."""
WIDTH = 12


class Net(nn.Module):
    """Three layers, of lengths that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 33)
        self.second = nn.Linear(33, 17)
        self.third = nn.Linear(17, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return five numbers for each row."""
        found: torch.Tensor = self.third(
            torch.tanh(self.second(torch.tanh(self.first(x))))
        )
        return found


def net() -> Net:
    """Return the model as every process begins with it."""
    torch.manual_seed(7)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a step, and what the model shall make of them."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.sin(x[:, :5]) + x[:, 5:10].square().clamp(max=1)


def part(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's rows of a step."""
    x, y = batch(step)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def loss_of(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the mean square of what is wrong."""
    return (got - want).square().mean()


def optimizer_of(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return the optimizer of all programs."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def alone(
    model: nn.Module | None = None,
    loss: Callable[[nn.Module, int], torch.Tensor] | None = None,
) -> list[float]:
    """Return the losses of the training in one process, over whole batches.

    Args:
        model: to be trained; by itself ``net()``.
        loss: of the model and a step; by itself ``loss_of``.
    """
    model = net() if model is None else model
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if loss is None:
            x, y = batch(step)
            value = loss_of(model(x), y)
        else:
            value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


class Expert(nn.Module):
    """One of the experts of a mixture."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        torch.manual_seed(40 + number)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many numbers as there are in ``x``."""
        found: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return found


class Mixture(nn.Module):
    """A mixture of experts in one process: each row goes to the ``k`` best of them."""

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.gate = gate(experts)
        self.experts = nn.ModuleList(Expert(number) for number in range(experts))
        self.chosen: list[torch.Tensor] = []
        """In each step: which experts each row has gone to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the experts' results, weighed by the gate."""
        weights = torch.softmax(self.gate(x), dim=1)
        best = weights.topk(self.k, dim=1).indices
        ones = torch.zeros_like(weights).scatter(1, best, 1.0)
        self.chosen.append(ones)
        chosen = ones * weights
        if self.k > 1:
            chosen = chosen / chosen.sum(dim=1, keepdim=True)
        each = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (chosen[:, :, None] * each).sum(dim=1)


def front() -> nn.Sequential:
    """Return the layer before a mixture, which needs the gradient of its input."""
    torch.manual_seed(29)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def gate(experts: int) -> nn.Linear:
    """Return what chooses among experts."""
    torch.manual_seed(30)
    return nn.Linear(WIDTH, experts, bias=False)


def head() -> nn.Linear:
    """Return the layer behind a mixture."""
    torch.manual_seed(31)
    return nn.Linear(WIDTH, 5)
