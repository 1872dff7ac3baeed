# SPDX-License-Identifier: Apache-2.0
"""Layers on grids of four axes beside the serial ones, on ranks as threads."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dist_tensor_cases import off_by
from torch import nn

from commrt.comm import Communicator
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import sync_gradients
from commrt.layers.tensor3d.gradients import cut_parameters
from commrt.local import run

NEAR = 1e-12
ORDER = ("data", "z", "y", "x")
Grid = tuple[int, ...]


def grids_of(*sizes: int) -> list[Grid]:
    """Return all factorisations of some numbers of ranks into data, z, y and x."""
    found = []
    for size in sizes:
        factors = [each for each in range(1, size + 1) if size % each == 0]
        for grid in itertools.product(factors, repeat=4):
            if math.prod(grid) == size:
                found.append(grid)
    return found


def axes_of(grid: Grid) -> dict[str, int]:
    """Return the axes of a ProcessGrid."""
    return dict(zip(ORDER, grid, strict=True))


def drawn_in(seed: int, *shape: int) -> Any:
    """Return a tensor in float64 that depends on the seed alone."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=draws)


def filled(module: nn.Module, seed: int) -> nn.Module:
    """Return a module in float64 whose parameters depend on the seed alone."""
    module = module.double()
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, dtype=torch.float64, generator=draws)
            parameter.copy_(values / max(1, parameter.shape[-1]) ** 0.5)
    return module


@dataclass
class Difference:
    """How far ranks are from one process, and what they have sent."""

    of: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, found: Any, expected: Any) -> None:
        """Keep the largest difference of each name."""
        off = off_by(found, expected)
        self.of[name] = max(self.of.get(name, 0.0), off)


Build = Callable[[nn.Module, ProcessGrid], nn.Module]


def compare(
    serial: nn.Module,
    grid: Grid,
    build: Build,
    batches: Sequence[Any],
    *,
    part_of_input: Callable[[Any, ProcessGrid], Any] | None = None,
    whole_output: Callable[[Any, ProcessGrid], Any] | None = None,
    passes: int = 1,
) -> dict[str, float]:
    """Return how far outputs and gradients on a grid are from those of one process.

    Args:
        serial: the whole model.
        grid: ranks along data, z, y and x.
        build: makes the model on a grid, on each rank.
        batches: the input of each place along data and z, in this order.
        part_of_input, whole_output: for layers whose input or output is cut.
        passes: backward passes, whose gradients add up.
    """
    serial = copy.deepcopy(serial)
    inputs, outputs, factors = [], [], []
    for number, batch in enumerate(batches):
        given = batch.clone()
        if given.is_floating_point():
            given.requires_grad_()
        y = serial(given)
        factor = drawn_in(1000 + number, *y.shape).to(y.dtype)
        for _ in range(passes):
            y.backward(factor, retain_graph=True)
        inputs.append(given)
        outputs.append(y.detach())
        factors.append(factor)

    def main(comm: Communicator) -> dict[str, float]:
        found = Difference()
        with ProcessGrid(comm, axes_of(grid)) as places:
            own = places.coords["data"] * grid[1] + places.coords["z"]
            model = build(copy.deepcopy(serial), places)
            for parameter in model.parameters():
                parameter.grad = None
            x = batches[own].clone()
            if x.is_floating_point():
                x.requires_grad_()
            for _ in range(passes):
                part = x if part_of_input is None else part_of_input(x, places)
                y = model(part)
                y = y if whole_output is None else whole_output(y, places)
                y.backward(factors[own])
            sync_gradients(model, places, average=False)
            found.note("output", y, outputs[own])
            if x.requires_grad:
                found.note("gradient of input", x.grad, inputs[own].grad)
            expected = dict(serial.named_parameters())
            for name, parameter, cut, _ in cut_parameters(model):
                right = expected[name]
                assert parameter.grad is not None, name
                mine, gradient = parameter.detach(), parameter.grad
                if cut is not None:
                    assert tuple(mine.shape) == cut.shard_shape
                    mine, gradient = cut.whole(mine), cut.whole(gradient)
                assert torch.equal(mine, right)
                found.note(f"gradient of {name}", gradient, right.grad)
        return found.of

    ranks = run(math.prod(grid), main, timeout_s=240)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def batches_of(grid: Grid, seed: int, *shape: int) -> list[Any]:
    """Return an input for each place along data and z; their lengths differ."""
    rng = random.Random(seed)
    return [
        drawn_in(seed + place, shape[0] + rng.choice((0, 1, 2)), *shape[1:])
        for place in range(grid[0] * grid[1])
    ]
