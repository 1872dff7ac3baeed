# SPDX-License-Identifier: Apache-2.0
"""Trainers learn digits from different images, alone and in tournaments.

    python -m commrt.examples.tournament

Four trainers have a quarter of few images each. A model is judged by 50 images: each
trainer has its own, or all have the same ones where a rule compares scores of different
trainers. With each rule they take as many steps as without one; the table has the mean
accuracy of their models on other images.

Without a launcher four ranks are threads of the process. ``python -m commrt.run -n 8``,
mpiexec and torchrun start ranks as well; their number is a multiple of four, and a
trainer's ranks then share its batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import commrt
from commrt import local
from commrt.comm import Communicator
from commrt.examples.digits import load_tensors
from commrt.examples.endings import ending_together
from commrt.launch.detect import detect
from commrt.layers.spatial.windows import even_ranges
from commrt.layers.tournament import (
    Consensus,
    Evolution,
    Mutation,
    Pairwise,
    Perturb,
    Selection,
    Tournament,
    Truncation,
)

__all__ = [
    "RULES",
    "Line",
    "Split",
    "accuracy",
    "main",
    "perceptron",
    "split_of",
    "trained",
]

TRAINERS = 4
NUM_TRAIN, NUM_VALIDATION = 400, 200
"""Images of all trainers; the rest of the 1,797 is for tests."""
HIDDEN = 32
BATCH = 16
LR, MOMENTUM = 0.1, 0.9
DEADLINE_S = 3600.0


class Line(NamedTuple):
    """The tournament of a line of the table."""

    selection: Selection
    """The rule."""
    mutate: Mutation | None = None
    """The mutation."""
    compares_trainers: bool = False
    """True if the rule compares scores of different trainers, which then judge by the
    same images."""


RULES: Mapping[str, Line | None] = {
    "alone": None,
    "Pairwise()": Line(Pairwise()),
    "Consensus()": Line(Consensus()),
    "Truncation(1)": Line(Truncation(1), compares_trainers=True),
    "Truncation(1), Perturb()": Line(Truncation(1), Perturb(), True),
    "Evolution(2)": Line(Evolution(2), compares_trainers=True),
}
"""The lines of the table by name; None: no tournament."""


class Split(NamedTuple):
    """Images of one kind, (images, 64), and the digits that they show."""

    pixels: torch.Tensor
    digits: torch.Tensor


def split_of(
    seed: int, trainer: int, *, is_shared: bool = False
) -> tuple[Split, Split, Split]:
    """Return a trainer's images to train and to validate, and all images for tests.

    With ``is_shared`` all trainers validate on the same images, as many as otherwise.
    """
    pixels, digits = load_tensors()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pixels), generator=generator)
    ends = NUM_TRAIN, NUM_TRAIN + NUM_VALIDATION
    train, validation = order[: ends[0]], order[ends[0] : ends[1]]
    judged = validation[0 if is_shared else trainer :: TRAINERS]
    chosen = train[trainer::TRAINERS], judged, order[ends[1] :]
    train_split, validation_split, test_split = (
        Split(pixels[each].flatten(1), digits[each]) for each in chosen
    )
    return train_split, validation_split, test_split


def perceptron(generator: torch.Generator) -> nn.Module:
    """Return a model whose first values the generator draws."""
    made = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    with torch.no_grad():
        for layer in (made[0], made[2]):
            bound = layer.in_features**-0.5
            for each in (layer.weight, layer.bias):
                each.uniform_(-bound, bound, generator=generator)
    return made


def accuracy(model: nn.Module, split: Split) -> float:
    """Return the part of images whose digit the model finds."""
    with torch.no_grad():
        found = model(split.pixels).argmax(1) == split.digits
    return float(found.double().mean())


def trained(
    comm: Communicator, name: str, seed: int, steps: int, every: int
) -> tuple[float, int]:
    """Return the mean test accuracy of all trainers, and how many models were taken.

    Args:
        comm: the ranks.
        name: a line of ``RULES``.
        seed: draws images, first values, batches and pairs.
        steps: of each trainer's optimizer.
        every: steps between two rounds.

    Collective over the ranks.
    """
    rule = RULES[name]
    selection, mutate, is_shared = rule or (None, None, False)
    taken = 0
    with Tournament(
        comm, TRAINERS, selection=selection, seed=seed, mutate=mutate
    ) as tournament:
        inner = tournament.trainer_comm
        trainer = tournament.trainer
        train, validation, test = split_of(seed, trainer, is_shared=is_shared)
        generator = torch.Generator().manual_seed(TRAINERS * seed + trainer)
        model = perceptron(generator)
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
        low, high = even_ranges(BATCH, inner.size)[inner.rank]

        def loss_of(model: nn.Module) -> float:
            with torch.no_grad():
                return float(
                    functional.cross_entropy(
                        model(validation.pixels), validation.digits
                    )
                )

        for step in range(steps):
            size = (BATCH,)
            batch = torch.randint(len(train.digits), size, generator=generator)
            own = batch[low:high]  # the ranks of a trainer share its batch
            optimizer.zero_grad()
            wrong = functional.cross_entropy(
                model(train.pixels[own]), train.digits[own], reduction="sum"
            )
            (wrong / BATCH).backward()
            for parameter in model.parameters():
                if inner.size > 1:
                    inner.allreduce(parameter.grad)
            optimizer.step()
            if rule is not None and (step + 1) % every == 0:
                outcome = tournament.step(model, loss_of, optimizer)
                sources = enumerate(outcome.sources)
                taken += sum(source != each for each, source in sources)
        mean = torch.tensor([accuracy(model, test) / comm.size], dtype=torch.float64)
        comm.allreduce(mean)
    return float(mean), taken


def main(argv: Sequence[str] | None = None) -> int:
    """Train with each rule and print the table; return the exit status."""
    arguments = _arguments(argv)
    torch.set_num_threads(1)  # ranks share the cores

    def on_ranks(comm: Communicator) -> None:
        with ending_together(comm):
            _table(comm, arguments)

    if detect().kind == "single":
        local.run(TRAINERS, on_ranks, timeout_s=DEADLINE_S)
    else:
        on_ranks(commrt.init())
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        "python -m commrt.examples.tournament", None, about
    )
    parser.add_argument("--steps", type=int, default=800, help="of each trainer")
    parser.add_argument("--every", type=int, default=20, help="steps between rounds")
    parser.add_argument("--seeds", type=int, default=5, help="runs with each rule")
    found = parser.parse_args(argv)
    for name in ("steps", "every", "seeds"):
        if getattr(found, name) < 1:
            parser.error(f"--{name} {getattr(found, name)}: expected a number from 1")
    return found


def _table(comm: Communicator, arguments: argparse.Namespace) -> None:
    steps, every = arguments.steps, arguments.every
    if comm.rank == 0:
        print(
            f"{TRAINERS} trainers on {comm.size} ranks, {steps} steps, a round every "
            f"{every}, {arguments.seeds} seeds"
        )
        print(f"{'rule':26} mean test accuracy (range)   models taken")
    for name in RULES:
        runs = [
            trained(comm, name, seed, steps, every) for seed in range(arguments.seeds)
        ]
        found, taken = zip(*runs, strict=True)
        mean, moved = sum(found) / len(found), sum(taken) / len(taken)
        if comm.rank == 0:
            ends = f"({100 * min(found):.1f} to {100 * max(found):.1f})"
            print(f"{name:26} {100 * mean:.2f} % {ends:18} {moved:9.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
