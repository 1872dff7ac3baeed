# SPDX-License-Identifier: Apache-2.0
"""A convolutional network learns handwritten digits under DistributedDataParallel.

    torchrun --nproc-per-node 2 -m commrt.examples.cnn --check

Each rank has an equal part of every batch, and DDP averages the gradients: the same
numbers as the whole batch gives one process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from commrt.examples import runs
from commrt.examples.digits import load_tensors

__all__ = ["BATCH", "Cnn", "batch_of", "main"]

BATCH = 120
"""Images of a step, over all ranks: a multiple of 2, 3, 4, 5, 6 and 8 ranks."""
STEPS = 100
SEED = 1


class Cnn(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Three convolutions and two linear layers, some 190,000 parameters.

    All of it is smooth: where a kink or a maximum decides, a last digit that differs is
    another path, and after fifty steps another loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.third = nn.Conv2d(64, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 16, 128)
        self.out = nn.Linear(128, 10)
        for layer in self.children():
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return ten numbers for each image."""
        x = functional.gelu(self.first(images))
        x = functional.avg_pool2d(functional.gelu(self.second(x)), 2)
        x = functional.gelu(self.third(x)).flatten(1)
        logits: torch.Tensor = self.out(functional.gelu(self.hidden(x)))
        return logits


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    arguments = runs.arguments_of("cnn", __doc__, STEPS, argv)
    with runs.job(arguments.backend):
        size = dist.get_world_size()
        if BATCH % size:
            runs.say(f"{size} ranks: expected a divisor of {BATCH}, the batch")
            return 2
        images, digits = load_tensors()
        data = images, digits

        def together() -> list[float]:
            model = DistributedDataParallel(made())
            losses = trained(model, data, arguments.steps, dist.get_rank(), size)
            right = accuracy(model, images, digits)
            runs.say(f"{right:.1%} of all digits are told right")
            return runs.mean_over_ranks(losses)

        def alone() -> list[float]:
            losses = trained(made(), data, arguments.steps, 0, 1)
            return [float(loss) for loss in losses]

        return runs.report(together, alone if arguments.check else None)


def made() -> Cnn:
    """Return the network that all processes begin with."""
    torch.manual_seed(SEED)
    return Cnn()


def batch_of(
    data: tuple[torch.Tensor, torch.Tensor], step: int, rank: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's part of a step's batch, which is drawn by the step's number."""
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(len(data[0]), (BATCH,), generator=generator)
    mine = chosen[rank::size]
    return data[0][mine], data[1][mine]


def trained(
    model: nn.Module,
    data: tuple[torch.Tensor, torch.Tensor],
    steps: int,
    rank: int,
    size: int,
) -> list[torch.Tensor]:
    """Train on a rank's parts of the batches; return its losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    losses = []
    for step in range(steps):
        images, digits = batch_of(data, step, rank, size)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def accuracy(model: nn.Module, images: torch.Tensor, digits: torch.Tensor) -> float:
    """Return the part of the images whose digit the network says."""
    with torch.no_grad():
        said = model(images).argmax(1)
    return float((said == digits).float().mean())


if __name__ == "__main__":
    sys.exit(main())
