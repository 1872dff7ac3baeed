# SPDX-License-Identifier: Apache-2.0
"""Models for pipelines, and the gradients that one process finds for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from commrt.layers.pipeline import MessageDrivenPipeline, split

WIDTH = 5


class Twin(nn.Module):
    """Returns several tensors: two of floats, and integers without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.other = nn.Linear(WIDTH, 2, dtype=torch.float32)

    def forward(self, x: Any) -> Any:
        places = torch.arange(len(x), dtype=torch.int32)
        return self.one(x), self.other(x.float()), places, x[:, :1].detach()


class Pass(nn.Module):
    """Passes a tuple on; one of its tensors it changes in place."""

    def forward(self, values: Any) -> Any:
        one, other, places, extra = values
        return one.mul_(2.0), other, places, extra


class Merge(nn.Module):
    """Makes one tensor of several; ignores one of those that could have a gradient."""

    def __init__(self, ignores: bool = False) -> None:
        super().__init__()
        self.ignores = ignores
        self.last = nn.Linear(3, WIDTH, dtype=torch.float64)

    def forward(self, values: Any) -> Any:
        one, other, places, extra = values
        y = self.last(one) + places[:, None] * 0.1 + extra
        return y if self.ignores else y + other.double().sum(1, keepdim=True)


class Strided(nn.Module):
    """Returns a transposed tensor, and an expanded one's values."""

    def forward(self, x: Any) -> Any:
        return x.t().contiguous().t() + torch.ones(1, dtype=x.dtype).expand_as(x)


class Failing(nn.Module):
    """Raises an error for a chosen micro-batch, forward or back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fail_at: int | None = None
        self.is_backward = False

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.fail_at is not None and self.calls > self.fail_at:
            if not self.is_backward:
                raise ArithmeticError(f"planted in call {self.calls}")
            x = x * 1.0
            x.register_hook(self._raise)
        return x

    def _raise(self, gradient: Any) -> None:
        raise ArithmeticError("planted on the way back")


def linear(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.rand(each.shape, generator=generator) - 0.5)
    return made


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def plain() -> nn.Sequential:
    return nn.Sequential(
        *(linear(1), nn.Tanh(), linear(2), nn.ReLU(inplace=True), linear(3)),
        *(nn.BatchNorm1d(WIDTH, dtype=torch.float64), linear(4), nn.Tanh()),
        *(linear(5), nn.Sigmoid()),
    )


def tuples() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        *(linear(1), Twin(), Pass(), Pass(), Pass(), Pass(), Pass(), Merge()),
        *(linear(2), Strided()),
    )


def ignoring() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(
        *(linear(1), Twin(), Pass(), Pass(), Pass(), Pass(), Pass(), Merge(True)),
        *(linear(2), Strided()),
    )


def frozen_first() -> nn.Sequential:
    return nn.Sequential(
        *(frozen(linear(1)), nn.Tanh(), frozen(linear(2)), nn.Tanh(), linear(3)),
        *(frozen(linear(4)), nn.Tanh(), linear(5), nn.Tanh(), frozen(linear(6))),
    )


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "plain": plain,
    "tuples": tuples,
    "ignoring": ignoring,
    "frozen first": frozen_first,
}


class Batch(NamedTuple):
    inputs: list[Any]
    targets: list[Any]

    def part(self, place: int, places: int) -> Batch:
        return Batch(self.inputs[place::places], self.targets[place::places])


def batch(sizes: Sequence[int], seed: int = 3) -> Batch:
    draws = torch.Generator().manual_seed(seed)

    def drawn(size: int) -> Any:
        return torch.randn(size, WIDTH, generator=draws, dtype=torch.float64)

    return Batch([drawn(size) for size in sizes], [drawn(size) for size in sizes])


def mean_loss(output: Any, target: Any) -> Any:
    return functional.mse_loss(output, target)


def sum_loss(output: Any, target: Any) -> Any:
    return functional.mse_loss(output, target, reduction="sum")


LOSSES = {"mean": mean_loss, "sum": sum_loss}


def gradients_of(module: nn.Module) -> dict[str, Any]:
    return {
        name: None if each.grad is None else each.grad.clone()
        for name, each in module.named_parameters()
    }


def serial(
    model: nn.Module, given: Batch, reduction: str = "mean"
) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients of one process; adds them to those that it has."""
    total = sum(len(x) for x in given.inputs)
    found = 0.0
    for x, target in zip(*given, strict=True):
        if len(x) == 0 and reduction == "mean":
            model(x.clone())
            continue
        loss = LOSSES[reduction](model(x.clone()), target)
        if reduction == "mean":
            loss = loss * (len(x) / total)
        loss.backward()
        found += float(loss.detach())
    return found, gradients_of(model)


def ranges_of(num_layers: int, stages: int) -> list[range]:
    """Return uneven ranges."""
    ends = [(num_layers * (at + 1) ** 2) // stages**2 for at in range(stages)]
    ends = [max(end, at + 1) for at, end in enumerate(ends)]
    return [*map(range, [0, *ends[:-1]], ends)]


def cut(model: nn.Sequential, stages: int, stage: int) -> nn.Module:
    """Return a copy of a stage."""
    made = split(copy.deepcopy(model), ranges_of(len(model), stages), stage)
    return made


def pipeline_of(
    comm: Any, model: nn.Sequential, reduction: str = "mean", **more: Any
) -> tuple[nn.Module, MessageDrivenPipeline]:
    stage = cut(model, comm.size, comm.rank)
    loss_fn = LOSSES[reduction]
    made = MessageDrivenPipeline(stage, comm, loss_fn, reduction=reduction, **more)
    return stage, made
