# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers of trainers, which differ by rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

Optimizers = list[torch.optim.Optimizer]


@contextlib.contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """Let this thread, and ranks that start within, compute with a number of threads.

    A batch norm of torch sums by thread, so bits depend on their number. A thread keeps
    the number that it began with, whatever another one sets later.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Net(nn.Module):
    """Tensors of many kinds: float64, float32, bfloat16, integers, scalars, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        self.last = nn.Linear(5, 3, bias=False)
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.strided = nn.Parameter(torch.ones(4, 3).t())
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("local", torch.zeros(2), persistent=False)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.first(x)).tanh().float()
        y = self.last(y) * self.scale + self.tied(y)
        return y + self.strided.sum() + self.empty.sum()


def net_of(seed: int) -> Net:
    """Return a net whose every tensor depends on the seed alone."""
    made = Net()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            drawn = torch.rand(tensor.shape, generator=generator) * 2
            tensor.copy_(drawn)
    return made


def trained(net: nn.Module, optimizers: Sequence[Any], seed: int, steps: int) -> None:
    """Take some steps on random samples of the seed."""
    generator = torch.Generator().manual_seed(seed)

    def loss() -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = net(x).float().square().mean()
        found.backward()
        return found

    for _ in range(steps):
        x = torch.rand(6, 3, dtype=torch.float64, generator=generator)
        for optimizer in optimizers:
            optimizer.step(loss)


def split_of(net: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the matrices of a net, and its other parameters."""
    parameters = [*net.parameters()]
    return (
        [each for each in parameters if each.ndim == 2],
        [each for each in parameters if each.ndim != 2],
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "none": lambda net: [],
    "sgd": lambda net: [torch.optim.SGD(net.parameters(), lr=0.01)],
    "momentum": lambda net: [torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)],
    "adam": lambda net: [torch.optim.Adam(net.parameters(), 0.01, amsgrad=True)],
    "adagrad": lambda net: [torch.optim.Adagrad(net.parameters(), lr=0.01)],
    "lbfgs": lambda net: [torch.optim.LBFGS([net.first.weight], max_iter=3)],
    "groups": lambda net: [
        torch.optim.AdamW(
            [
                {"params": part, "lr": lr}
                for part, lr in zip(
                    split_of(net), (0.1, torch.tensor(0.02)), strict=True
                )
            ],
            foreach=False,
        )
    ],
    "two": lambda net: [
        torch.optim.RMSprop(split_of(net)[0], lr=0.01, momentum=0.5),
        torch.optim.Adam(split_of(net)[1], lr=0.01),
    ],
}


def snapshot(net: nn.Module, optimizers: Sequence[Any] = ()) -> Any:
    """Return a copy of all that a tournament moves."""
    return copy.deepcopy([net.state_dict(), [each.state_dict() for each in optimizers]])


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two states have the same bits, types and numbers."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return {*one} == {*other} and all(is_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def tensors_in(state: Any) -> list[Any]:
    """Return the tensors of a state, each once."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = [*state.values()]
    if not isinstance(state, list | tuple):
        return []
    found = [tensor for each in state for tensor in tensors_in(each)]
    return [*{each.data_ptr() or id(each): each for each in found}.values()]


def distance(net: Any, best: Any) -> float:
    """Return a score whose best model is ``best``; a tensor with a gradient is one."""
    found: Any = (net.first.weight - best.first.weight).abs().sum()
    return found


def raising(*_: Any) -> Any:
    """Raise an error, whatever is asked."""
    raise ZeroDivisionError("of the test")
