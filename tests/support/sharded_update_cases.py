# SPDX-License-Identifier: Apache-2.0
"""Sharded optimizers beside plain ones, on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim

from commrt.comm import Communicator
from commrt.layers.sharded_update import ShardedOptimizer
from commrt.local import run

SHAPES: tuple[tuple[int, ...], ...] = (
    (40, 9),
    (5,),
    (),
    (0,),
    (3, 1, 64),
    (333,),
    (1,),
)
"""Uneven lengths, among them 0 and 1."""
MATRICES: tuple[tuple[int, ...], ...] = ((40, 9), (5, 7), (1, 1), (33, 2), (3, 64))
Make = Callable[..., optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "plain sgd": (optim.SGD, {"lr": 0.1, "foreach": True}),
    "adam": (optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "adamw": (optim.AdamW, {"lr": 0.1, "foreach": True}),
    "adamw, for loop": (optim.AdamW, {"lr": 0.1, "foreach": False}),
    "adamw, fused": (optim.AdamW, {"lr": 0.1, "fused": True}),
    "sgd, fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 0.5}),
    "adamax": (optim.Adamax, {"lr": 0.1}),
    "asgd": (optim.ASGD, {"lr": 0.1}),
    "nadam": (optim.NAdam, {"lr": 0.1}),
    "radam": (optim.RAdam, {"lr": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    "rprop": (optim.Rprop, {"lr": 0.1}),
    "adafactor": (optim.Adafactor, {"lr": 0.1}),
    "muon": (optim.Muon, {"lr": 0.1}),
}
"""Factories of all optimizers of torch that can be divided, with arguments."""


def shapes_of(kind: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that an optimizer takes."""
    return MATRICES if kind in ("adafactor", "muon") else SHAPES


def made_parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64
) -> list[nn.Parameter]:
    """Return parameters that are equal on all ranks."""
    draws = torch.Generator().manual_seed(4)
    return [
        nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def gradient_of(rank: int, step: int, at: int, like: torch.Tensor) -> torch.Tensor:
    """Return a rank's gradient: small integers, whose sums are exact in any order."""
    draws = torch.Generator().manual_seed(1000 * step + 10 * rank + at)
    values = torch.randint(-8, 9, like.shape, generator=draws)
    return values.to(like.dtype)


def give_gradients(
    parameters: Sequence[torch.Tensor],
    ranks: Sequence[int],
    step: int,
    absent: Callable[[int, int, int], bool] = lambda rank, step, at: False,
) -> None:
    """Set gradients to the sums of some ranks' ones; None where all are absent."""
    for at, parameter in enumerate(parameters):
        given = [
            gradient_of(rank, step, at, parameter)
            for rank in ranks
            if not absent(rank, step, at)
        ]
        parameter.grad = None
        if given:
            parameter.grad = torch.stack(given).sum(0)


def trained_alone(
    kind: str, ranks: int, steps: int
) -> tuple[list[nn.Parameter], optim.Optimizer]:
    """Train by the plain optimizer, with the gradients of all ranks."""
    factory, arguments = OPTIMIZERS[kind]
    parameters = made_parameters(shapes_of(kind))
    optimizer = factory(parameters, **arguments)
    for step in range(steps):
        give_gradients(parameters, range(ranks), step)
        optimizer.step()
    return parameters, optimizer


def trained_together(
    comm: Communicator, kind: str, steps: int, first: int = 0, **more: Any
) -> tuple[list[nn.Parameter], ShardedOptimizer]:
    """Train by the sharded optimizer; each rank has gradients of its own."""
    factory, arguments = OPTIMIZERS[kind]
    parameters = made_parameters(shapes_of(kind))
    arguments = {"op": "sum", "bucket_nbytes": 4000, **arguments, **more}
    optimizer = ShardedOptimizer(parameters, comm, factory, **arguments)
    for step in range(first, first + steps):
        give_gradients(parameters, [comm.rank], step)
        optimizer.step()
    return parameters, optimizer


def assert_equal_state(found: Any, expected: Any) -> None:
    """Raise AssertionError unless two state_dicts have the same bits."""
    assert {*found["state"]} == {*expected["state"]}
    for number, state in expected["state"].items():
        assert {*found["state"][number]} == {*state}
        for name, value in state.items():
            mine = found["state"][number][name]
            if isinstance(value, torch.Tensor):
                assert mine.dtype == value.dtype, (number, name)
                assert mine.shape == value.shape, (number, name)
                assert torch.equal(mine, value), (number, name)
            else:
                assert mine == value, (number, name)
    assert found["param_groups"] == expected["param_groups"]


def on_ranks(size: int, main: Callable[[Communicator], Any]) -> list[Any]:
    """Run on ranks that are threads."""
    return run(size, main, timeout_s=240)
