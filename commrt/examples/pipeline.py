# SPDX-License-Identifier: Apache-2.0
"""Train a perceptron whose layers lie on different ranks: it learns digits.

    torchrun --nproc-per-node 4 -m commrt.examples.pipeline --check
    torchrun --nproc-per-node 4 -m commrt.examples.pipeline --schedule 1F1B --check

Layers are measured on rank 0, and cut so that the slowest stage is as quick as it can
be. ``--schedule message`` runs commrt's pipeline without a schedule. Other names are
those of torch's schedules, such as GPipe, 1F1B, Interleaved1F1B and
InterleavedZeroBubble, which run with the same cut over commrt or gloo.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.nn import functional

from commrt.examples import runs
from commrt.examples.digits import load_digits
from commrt.layers.pipeline import (
    MessageDrivenPipeline,
    Placement,
    measure_layers,
    partition,
    split,
)

__all__ = ["layers", "main", "trained"]

SEED = 5
BATCH, MICRO_BATCHES = 128, 8
MESSAGE = "message"


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m commrt.examples.pipeline", None, about)
    parser.add_argument("--backend", default="commrt", help="commrt, or gloo")
    parser.add_argument(
        "--schedule", default=MESSAGE, help="message, or one of torch's"
    )
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    given = parser.parse_args(argv)
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: expected a number from 1")
    if given.schedule != MESSAGE:
        try:
            get_schedule_class(given.schedule)
        except ValueError as error:
            parser.error(f"--schedule {given.schedule}: {error}")
    with runs.job(given.backend):
        comm = getattr(dist.group.WORLD, "communicator", None)
        if given.schedule == MESSAGE and comm is None:
            runs.say(f"backend {given.backend}: --schedule message needs commrt's")
            return 2
        stages, most = _num_stages(given.schedule, dist.get_world_size()), len(layers())
        if stages > most:  # all ranks see it, and rank 0 measures nothing
            runs.say(
                f"--schedule {given.schedule} makes {stages} stages of "
                f"{dist.get_world_size()} ranks, and the model has {most} layers; "
                f"start fewer ranks"
            )
            return 2

        def alone() -> list[float]:
            return _alone(given.steps)

        return runs.report(
            lambda: trained(given.schedule, given.steps), alone if given.check else None
        )


def layers() -> nn.Sequential:
    """Return the layers of the perceptron, of very different widths."""
    torch.manual_seed(SEED)
    widths = 64, 256, 256, 96, 96, 48, 48, 32, 10
    found: list[nn.Module] = []
    for before, behind in itertools.pairwise(widths):
        found += [nn.Linear(before, behind), nn.Tanh()]
    return nn.Sequential(*found[:-1]).double()


def trained(schedule: str, steps: int) -> list[float]:
    """Train on all ranks by a schedule's name; return the losses."""
    if schedule == MESSAGE:
        comm = getattr(dist.group.WORLD, "communicator", None)
        assert comm is not None  # it has been checked
        stage = split(layers(), _placement(comm.size).ranges, comm.rank)
        with MessageDrivenPipeline(stage, comm, functional.cross_entropy) as pipeline:
            optimizer = torch.optim.Adam(stage.parameters(), lr=0.003)
            losses = []
            for x, target in _batches(steps):
                optimizer.zero_grad()
                micro = x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES)
                losses.append(pipeline.step(*micro))
                optimizer.step()
        return losses
    return _by_torch(schedule, steps)


def _num_stages(schedule: str, num_ranks: int) -> int:
    """Return how many stages a schedule makes."""
    if schedule == MESSAGE:
        return num_ranks
    is_single = issubclass(get_schedule_class(schedule), PipelineScheduleSingle)
    return num_ranks if is_single else 2 * num_ranks


def _placement(stages: int) -> Placement:
    """Return the cut that rank 0 has measured."""
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        x, _ = _batches(1)[0]
        costs = measure_layers(layers(), x.chunk(MICRO_BATCHES)[0])
        said = [partition(costs, [1.0] * stages)]
    dist.broadcast_object_list(said)
    found: Placement = said[0]
    return found


def _by_torch(name: str, steps: int) -> list[float]:
    """Train by one of torch's schedules."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = get_schedule_class(name)
    is_single = issubclass(kind, PipelineScheduleSingle)
    num_stages = _num_stages(name, size)
    numbers = [*range(rank, num_stages, size)]
    if name.lower() in ("zbvzerobubble", "dualpipev"):  # stages go there and back
        numbers = [rank, num_stages - 1 - rank]
    ranges = _placement(num_stages).ranges
    parts = [split(layers(), ranges, number) for number in numbers]
    device = torch.device("cpu")
    stages = [
        PipelineStage(part, number, num_stages, device)
        for part, number in zip(parts, numbers, strict=True)
    ]
    given: Any = stages[0] if is_single else stages
    runner = kind(given, MICRO_BATCHES, loss_fn=functional.cross_entropy)
    parameters = [each for part in parts for each in part.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.003)
    losses = []
    for x, target in _batches(steps):
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        inputs = (x,) if 0 in numbers else ()
        more: dict[str, Any] = {}
        if num_stages - 1 in numbers:
            more = {"target": target, "losses": found}
        runner.step(*inputs, **more)
        optimizer.step()
        loss = torch.stack(found).mean() if found else torch.zeros((), dtype=x.dtype)
        dist.all_reduce(loss.detach_())
        losses.append(float(loss))
    return losses


def _batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, digits = load_digits()
    pixels = torch.from_numpy(images.reshape(len(images), -1) / 16.0).double()
    target = torch.from_numpy(digits.astype("int64"))
    draws = torch.Generator().manual_seed(SEED)
    chosen = (
        torch.randint(len(pixels), (BATCH,), generator=draws) for _ in range(steps)
    )
    return [(pixels[own], target[own]) for own in chosen]


def _alone(steps: int) -> list[float]:
    """Train in one process; return the losses."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for x, target in _batches(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    sys.exit(main())
