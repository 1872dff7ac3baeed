# SPDX-License-Identifier: Apache-2.0
"""One function that trains: ``train()`` is one process as it stands, and every rung.

A rung changes what it gives to this function: batches that are cut, a model that is
cut, another optimizer, something to do behind the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional

import commrt.trace
from commrt.comm import Communicator
from commrt.examples.field.tiles import SIDE, Field, Tiles, load_field
from commrt.trace.recording import Recording

__all__ = [
    "Batch",
    "Batches",
    "Order",
    "Settings",
    "Trained",
    "divided",
    "mean_square",
    "train",
]

Tensor: TypeAlias = torch.Tensor
Order: TypeAlias = Sequence[Sequence[Tensor]]
"""Of each epoch, the numbers of each batch's tiles."""

PIXELS = SIDE * SIDE
SEED = 1


@dataclass(frozen=True)
class Settings:
    """Settings that all rungs share."""

    epochs: int = 5
    batch: int = 32
    """Tiles of a step, over all ranks. The last step of an epoch has the rest."""
    lr: float = 2e-3
    dtype: torch.dtype = torch.float64
    """Of parameters, tiles and sums: with float64 a wrong sum is seen at once."""
    num_tiles: int = 1 << 30
    """Tiles to learn, at most."""
    order: Order | None = None
    """Batches of each epoch; None: all tiles, shuffled by a seed."""

    def field(self) -> Field:
        """Return the tiles."""
        return load_field(self.dtype, self.num_tiles)

    def steps(self) -> int:
        """Return the steps of an epoch."""
        return -(-len(self.field().learned.guess) // self.batch)


class Batch(NamedTuple):
    """This rank's tiles of one step."""

    guess: Tensor
    detail: Tensor
    total: int
    """Tiles of the step, those of other ranks included."""


Batches: TypeAlias = Callable[[int], Iterable[Batch]]
"""Gives the batches of an epoch, which counts from 0."""


@dataclass(frozen=True)
class Trained:
    """Losses and communication of a training."""

    losses: list[float]
    """Of each epoch, the mean square of what is wrong, over all pixels of its tiles."""
    model: Callable[[Any], Any]
    recording: Recording
    """The log of the first epoch."""
    order: Order | None = None
    """Batches of all ranks together, where they are not those of the settings."""

    def over(self, comm: Communicator) -> Trained:
        """Return the losses of all ranks, where each has those of its own tiles."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        comm.allreduce(losses)
        return replace(self, losses=losses.tolist())


def train(
    model: Callable[[Any], Any],
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    settings: Settings,
    *,
    step: Callable[[Batch], float] | None = None,
    after_backward: Callable[[], None] | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Trained:
    """Train for some epochs.

    Args:
        model: returns the detail of tiles.
        optimizer: of its parameters.
        batches: of each epoch.
        settings: the number of epochs is taken from them.
        step: adds a batch's gradients to the parameters and returns its loss; None: the
            forward and the backward pass of ``model``.
        after_backward: called before each step of the optimizer.
        scheduler: changes the learning rate behind each step.
    """

    def forward_and_backward(batch: Batch) -> float:
        wrong = (model(batch.guess) - batch.detail).square().sum()
        loss = wrong / (batch.total * PIXELS)  # so the ranks' losses add up to the mean
        loss.backward()
        return float(loss.detach())

    add_gradients = step or forward_and_backward

    def one_epoch(number: int) -> float:
        weighted, num_tiles = 0.0, 0
        for batch in batches(number):
            optimizer.zero_grad()
            weighted += add_gradients(batch) * batch.total
            if after_backward is not None:
                after_backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            num_tiles += batch.total
        return weighted / num_tiles

    with commrt.trace.record() as recording:
        losses = [one_epoch(0)]
    losses += [one_epoch(number) for number in range(1, settings.epochs)]
    return Trained(losses, model, recording)


def divided(settings: Settings, place: int = 0, places: int = 1) -> Batches:
    """Return one of so many even parts of each batch; a part may be empty.

    All ranks draw the same order of tiles, so their parts make up the batch.
    """
    tiles = settings.field().learned
    order = settings.order or shuffled_order(settings, len(tiles.guess))

    def batches(epoch: int) -> Iterator[Batch]:
        for numbers in order[epoch]:
            own = numbers.tensor_split(places)[place]
            yield Batch(tiles.guess[own], tiles.detail[own], len(numbers))

    return batches


def shuffled_order(settings: Settings, num_tiles: int) -> Order:
    """Return an order of all tiles for each epoch, in batches."""
    draws = torch.Generator().manual_seed(SEED)
    return [
        torch.randperm(num_tiles, generator=draws).split(settings.batch)
        for _ in range(settings.epochs)
    ]


def mean_square(model: Callable[[Any], Any], tiles: Tiles) -> float:
    """Return the mean square of what is wrong over tiles, without learning."""
    with torch.no_grad():
        return float(functional.mse_loss(model(tiles.guess), tiles.detail))
