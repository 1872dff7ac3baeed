# SPDX-License-Identifier: Apache-2.0
"""Modules with branches beside the serial ones, on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensor3d_cases import Difference, drawn_in
from torch import nn

from commrt.comm import Communicator
from commrt.layers.branches import Branches, load_state_dict, sync_gradients
from commrt.local import run

FEATURES = 5
Join = Any


def makers(number: int, join: Join = "sum") -> dict[str, Callable[[], nn.Module]]:
    """Return branches of several depths; with "concat" also of several widths."""

    def made(at: int) -> nn.Module:
        width = 4 + at % 3 if join == "concat" else 4
        layers: list[nn.Module] = []
        for _ in range(at % 3):
            layers += [nn.Linear(FEATURES, FEATURES), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(FEATURES, width)).double()

    return {f"b{at}": (lambda at=at: made(at)) for at in range(number)}


def product(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the product of all outputs."""
    total = torch.ones(())
    for name in sorted(outputs):
        total = total * outputs[name]
    return total


class Serial(nn.Module):
    """Branches of torch alone, with the names of those under test."""

    def __init__(self, branches: dict[str, nn.Module], join: Join) -> None:
        super().__init__()
        self.names, self.join = [*branches], join
        for name, module in branches.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the joined outputs."""
        outputs = {name: getattr(self, name)(x) for name in self.names}
        if callable(self.join):
            joined: torch.Tensor = self.join(outputs)
            return joined
        if self.join == "concat":
            return torch.cat([*outputs.values()], -1)
        return sum(outputs.values(), torch.zeros(()))


class Network(nn.Module):
    """A linear layer before branches, which all ranks have."""

    def __init__(self, branches: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES).double()
        self.branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the branches' outputs."""
        y: torch.Tensor = self.branches(self.first(x).tanh())
        return y


def serial_of(number: int, join: Join = "sum") -> Network:
    """Return the serial network."""
    torch.manual_seed(5)
    made = {name: make() for name, make in makers(number, join).items()}
    return Network(Serial(made, join))


def batches(ranks: int, samples: str, counts: Sequence[int] | None = None) -> list[Any]:
    """Return the samples of each rank: uneven numbers, or the same ones."""
    if samples == "all":
        return [drawn_in(1, 11, FEATURES)] * ranks
    counts = [(3 * rank + 2) % 5 for rank in range(ranks)] if counts is None else counts
    return [drawn_in(rank, count, FEATURES) for rank, count in enumerate(counts)]


def compare(
    ranks: int,
    number: int,
    *,
    samples: str = "own",
    join: Join = "sum",
    counts: Sequence[int] | None = None,
    **more: Any,
) -> dict[str, float]:
    """Return how far outputs and gradients are from those of one process.

    The loss is the sum of squares over the samples of all ranks.
    """
    given = batches(ranks, samples, counts)
    serial = serial_of(number, join)
    whole = torch.cat(given) if samples == "own" else given[0]
    whole = whole.clone().requires_grad_()
    right = serial(whole)
    right.square().sum().backward()
    expected = dict(serial.named_parameters())
    ends = [0]
    for each in given:
        ends.append(ends[-1] + len(each))

    def main(comm: Communicator) -> dict[str, float]:
        off = Difference()
        layer = Branches(makers(number, join), comm, samples=samples, join=join, **more)
        model = Network(layer)
        load_state_dict(model, serial.state_dict())
        low, high = ends[comm.rank], ends[comm.rank + 1]
        own = slice(low, high) if samples == "own" else slice(None)
        for _ in range(2):
            model.zero_grad()
            x = given[comm.rank].clone().requires_grad_()
            y = model(x)
            y.square().sum().backward()
            sync_gradients(model, average=False)
        off.note("output", y, right[own])
        off.note("input", x.grad, whole.grad[own])
        for name, parameter in model.named_parameters():
            off.note(name, parameter.grad, expected[name].grad)
        held = {name for name, _ in layer.named_children()}
        assert held == {layer.names[at] for at in layer.placement.of(comm.rank)}
        layer.close()
        return off.of

    found: dict[str, float] = {}
    for each in run(ranks, main, timeout_s=240):
        for name, value in each.items():
            found[name] = max(found.get(name, 0.0), value)
    assert {*expected} <= {*found}
    return found
