# SPDX-License-Identifier: Apache-2.0
"""The rungs: from one process to ranks in a grid, each a few lines from the one before.

docs/tutorial-training.md goes through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from commrt.comm import Communicator
from commrt.examples.field.model import BLOCKS, HEAD, WIDTH, made
from commrt.examples.field.schedules import scaled_lr, warm_up
from commrt.examples.field.training import (
    Batch,
    Order,
    Settings,
    Trained,
    divided,
    train,
)
from commrt.layers.pipeline import MessageDrivenPipeline, partition, split
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.samples import BatchLoader, PartialShuffle
from commrt.layers.sharded_update import ShardedOptimizer
from commrt.layers.tensor3d import (
    Linear3d,
    attention_form,
    parallelize,
    sync_gradients,
)

__all__ = ["RUNGS", "cut", "scaled", "serial", "stage_of"]

Rung: TypeAlias = Callable[[Communicator, Settings], Trained]

MICRO_BATCH = 4
"""Tiles of a pipeline's micro-batch, at most."""
FRACTION = 0.5
"""Of its tiles that a rank gives away before each epoch."""


def serial(settings: Settings) -> Trained:
    """Train in one process."""
    model = made(settings.dtype)
    optimizer = AdamW(model.parameters(), settings.lr)
    batches = divided(settings)
    return train(model, optimizer, batches, settings)


def data(comm: Communicator, settings: Settings) -> Trained:
    """Give each rank a part of each batch, and add gradients up."""
    model = made(settings.dtype)
    optimizer = AdamW(model.parameters(), settings.lr)
    batches = divided(settings, comm.rank, comm.size)

    def add_up() -> None:
        for parameter in model.parameters():
            comm.allreduce(parameter.grad)

    trained = train(model, optimizer, batches, settings, after_backward=add_up)
    return trained.over(comm)


def buckets(comm: Communicator, settings: Settings) -> Trained:
    """Send all gradients of a step together."""
    with ProcessGrid(comm, {"data": 0}) as grid:
        model = made(settings.dtype)
        optimizer = AdamW(model.parameters(), settings.lr)
        batches = divided(settings, comm.rank, comm.size)

        def add_up() -> None:
            sync_gradients(model, grid, average=False)

        trained = train(model, optimizer, batches, settings, after_backward=add_up)
    return trained.over(comm)


def samples(comm: Communicator, settings: Settings) -> Trained:
    """Keep tiles on ranks of their own, and let some change ranks before each epoch."""
    model = made(settings.dtype)
    optimizer = AdamW(model.parameters(), settings.lr)
    tiles = settings.field().learned
    part = torch.arange(len(tiles.guess)).tensor_split(comm.size)[comm.rank]
    held = {"guess": tiles.guess[part], "detail": tiles.detail[part], "number": part}
    seen: list[list[list[int]]] = []

    def add_up() -> None:
        for parameter in model.parameters():
            comm.allreduce(parameter.grad)

    with PartialShuffle(held, comm, FRACTION) as shuffle:
        share = -(-settings.batch // comm.size)
        loader = BatchLoader(shuffle, share, overlap_steps=0)

        def batches(epoch: int) -> Any:
            seen.append([])
            for batch in loader:
                own = batch.samples
                seen[-1].append(own["number"].tolist())
                yield Batch(own["guess"], own["detail"], batch.total)

        trained = train(model, optimizer, batches, settings, after_backward=add_up)
    return replace(trained.over(comm), order=_order_of_all(comm, seen))


def _order_of_all(comm: Communicator, seen: list[list[list[int]]]) -> Order:
    """Return the tiles of each step over all ranks, for one process to repeat."""
    everybodys = comm.allgather_object(seen)
    return [
        [
            torch.tensor([*chain(*parts)], dtype=torch.int64)
            for parts in zip(*epoch, strict=True)
        ]
        for epoch in zip(*everybodys, strict=True)
    ]


def bfloat16(comm: Communicator, settings: Settings) -> Trained:
    """Keep parameters in float32, and compute products in bfloat16."""
    settings = replace(settings, dtype=torch.float32)
    model = made(settings.dtype)
    optimizer = AdamW(model.parameters(), settings.lr)
    batches = divided(settings, comm.rank, comm.size)

    def forward(guess: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(guess)

    def add_up() -> None:
        for parameter in model.parameters():
            comm.allreduce(parameter.grad)

    trained = train(forward, optimizer, batches, settings, after_backward=add_up)
    return trained.over(comm)


def scaled(
    comm: Communicator,
    settings: Settings,
    factor: int,
    rule: str,
    warm_up_epochs: int,
) -> Trained:
    """Take larger batches, with a learning rate that follows them."""
    rate = scaled_lr(settings.lr, factor, rule)
    settings = replace(settings, batch=factor * settings.batch)
    model = made(settings.dtype)
    optimizer = AdamW(model.parameters(), rate)
    batches = divided(settings, comm.rank, comm.size)
    steps = warm_up_epochs * settings.steps()
    start = settings.lr / rate
    scheduler = LambdaLR(optimizer, lambda step: warm_up(step, steps, start))

    def add_up() -> None:
        for parameter in model.parameters():
            comm.allreduce(parameter.grad)

    trained = train(
        *(model, optimizer, batches, settings),
        after_backward=add_up,
        scheduler=scheduler,
    )
    return trained.over(comm)


def zero(comm: Communicator, settings: Settings) -> Trained:
    """Divide the optimizer's state among the ranks (ZeRO, stage 1)."""
    model = made(settings.dtype)
    optimizer = ShardedOptimizer(
        model.parameters(), comm, AdamW, op="sum", lr=settings.lr
    )
    batches = divided(settings, comm.rank, comm.size)
    with optimizer:
        trained = train(model, optimizer, batches, settings)
    return trained.over(comm)


def cut(model: nn.Sequential, grid: ProcessGrid) -> nn.Sequential:
    """Cut the blocks' layers along the axis ``x``: heads, and hidden features."""
    first, second = attention_form(WIDTH, HEAD)
    for block in model[1 : 1 + BLOCKS]:
        attention = block.attention
        attention.qkv = Linear3d.from_linear(attention.qkv, grid, first)
        attention.out = Linear3d.from_linear(attention.out, grid, second)
        parallelize(block.perceptron, grid, broadcast=False)
    return model


def tensor(comm: Communicator, settings: Settings) -> Trained:
    """Cut the model's layers; all ranks have the same tiles."""
    with ProcessGrid(comm, {"data": 1, "x": 0}) as grid:
        model = cut(made(settings.dtype), grid)
        optimizer = AdamW(model.parameters(), settings.lr)
        batches = divided(settings)
        return train(model, optimizer, batches, settings)


def stage_of(model: nn.Sequential, number: int, stages: int) -> nn.Module:
    """Return the modules of one stage; those at the ends cost little."""
    costs = [0.2, *[1.0] * BLOCKS, 0.2]
    return split(model, partition(costs, [1.0] * stages).ranges, number)


def pipeline(comm: Communicator, settings: Settings) -> Trained:
    """Give each rank some of the modules, one behind the other."""
    stage = stage_of(made(settings.dtype), comm.rank, comm.size)
    optimizer = AdamW(stage.parameters(), settings.lr)
    batches = divided(settings)
    with MessageDrivenPipeline(stage, comm, functional.mse_loss) as pipe:

        def step(batch: Batch) -> float:
            micro = batch.guess.split(MICRO_BATCH), batch.detail.split(MICRO_BATCH)
            return pipe.step(*micro)

        return train(stage, optimizer, batches, settings, step=step)


def data_tensor(comm: Communicator, settings: Settings) -> Trained:
    """Let pairs of ranks share each layer, and the pairs share each batch."""
    with ProcessGrid(comm, {"data": 0, "x": 2}) as grid:
        model = cut(made(settings.dtype), grid)
        optimizer = AdamW(model.parameters(), settings.lr)
        batches = divided(settings, grid.coords["data"], grid.size("data"))

        def add_up() -> None:
            sync_gradients(model, average=False)

        trained = train(model, optimizer, batches, settings, after_backward=add_up)
        return trained.over(grid["data"])


def data_pipeline(comm: Communicator, settings: Settings) -> Trained:
    """Make pipelines of two stages, which share each batch."""
    with ProcessGrid(comm, {"data": 0, "pipe": 2}) as grid:
        stage = stage_of(made(settings.dtype), grid.coords["pipe"], 2)
        optimizer = AdamW(stage.parameters(), settings.lr)
        batches = divided(settings, grid.coords["data"], grid.size("data"))
        with MessageDrivenPipeline(stage, grid, functional.mse_loss) as pipe:

            def step(batch: Batch) -> float:
                micro = batch.guess.split(MICRO_BATCH), batch.detail.split(MICRO_BATCH)
                return pipe.step(*micro)

            return train(stage, optimizer, batches, settings, step=step)


def _alone(comm: Communicator, settings: Settings) -> Trained:
    """Train on each rank by itself; nothing is sent."""
    return serial(settings)


RUNGS: dict[str, Rung] = {
    "serial": _alone,
    "data": data,
    "buckets": buckets,
    "samples": samples,
    "bfloat16": bfloat16,
    "zero": zero,
    "tensor": tensor,
    "pipeline": pipeline,
    "data-tensor": data_tensor,
    "data-pipeline": data_pipeline,
}
"""Rungs that train as one process does; ``scaling`` compares several trainings."""
