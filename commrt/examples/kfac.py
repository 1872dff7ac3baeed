# SPDX-License-Identifier: Apache-2.0
"""Ranks learn digits by K-FAC and by SGD, in as few steps as each can.

    python -m commrt.examples.kfac

Both optimizers have the same model, batches and momentum. For each, a grid of settings
is tried on some seeds; the table has the mean number of steps to a loss on all images
for training, for every setting. The best of each kind then run on other seeds. Without
a launcher two ranks are threads of the process; ``python -m commrt.run -n 4``, mpiexec
and torchrun start ranks as well.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
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
from commrt.layers.data import GradientReducer
from commrt.layers.kfac import KFAC
from commrt.layers.spatial.windows import even_ranges

__all__ = ["Setting", "main", "steps_to"]

RANKS = 2
NUM_TRAIN = 1500
BATCH = 128
MOMENTUM = 0.9
DEADLINE_S = 3600.0


class Setting(NamedTuple):
    """An optimizer of the grid; a damping makes it K-FAC."""

    lr: float
    damping: float | None = None

    def __str__(self) -> str:
        if self.damping is None:
            return f"SGD, lr {self.lr}"
        return f"K-FAC, lr {self.lr}, damping {self.damping}"


SGD = [Setting(lr) for lr in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)]
K_FAC = [
    Setting(*each) for each in itertools.product((0.1, 0.2, 0.4), (0.03, 0.1, 0.3))
]


def network(seed: int) -> nn.Module:
    """Return a convolutional network whose first values the seed draws."""
    made = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in made:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                bound = layer.weight[0].numel() ** -0.5
                for each in layer.parameters():
                    each.uniform_(-bound, bound, generator=generator)
    return made


def steps_to(
    comm: Communicator, setting: Setting, seed: int, target: float, most: int
) -> int:
    """Return the steps until the loss on all images is at most ``target``.

    Args:
        comm: the ranks, which share each batch.
        setting: the optimizer.
        seed: draws first values and batches.
        target: of the mean loss, looked at after every fifth step.
        most: steps after which it gives up.

    Collective; the same number on all ranks.
    """
    pixels, digits = (each[:NUM_TRAIN] for each in load_tensors())
    model = network(seed)
    generator = torch.Generator().manual_seed(seed)
    low, high = even_ranges(BATCH, comm.size)[comm.rank]
    parameters = [*model.parameters()]
    kfac = reducer = None
    optimizer: torch.optim.Optimizer
    if setting.damping is None:
        optimizer = torch.optim.SGD(parameters, setting.lr, momentum=MOMENTUM)
        reducer = GradientReducer(comm, parameters)
    else:
        optimizer = kfac = KFAC(
            *(model, comm, setting.lr),
            momentum=MOMENTUM,
            damping=setting.damping,
            kl_clip=0.01,
        )
    try:
        for step in range(most):
            batch = torch.randint(NUM_TRAIN, (BATCH,), generator=generator)
            own = batch[low:high]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(pixels[own]), digits[own])
            loss.backward()
            if reducer is not None:
                reducer([each.grad for each in parameters])
            optimizer.step()
            if step % 5 == 4:
                with torch.no_grad():
                    found = functional.cross_entropy(model(pixels), digits)
                # All ranks go on, or none: bits of losses may differ.
                value = torch.tensor([float(found)])
                comm.bcast(value, root=0)
                if float(value) <= target:
                    return step + 1
    finally:
        if kfac is not None:
            kfac.free()
        if reducer is not None:
            reducer.close()
    return most


def main(argv: Sequence[str] | None = None) -> int:
    """Try all settings and print the table; return the exit status."""
    arguments = _arguments(argv)
    torch.set_num_threads(1)  # ranks share the cores

    def on_ranks(comm: Communicator) -> None:
        with ending_together(comm):
            _table(comm, arguments)

    if detect().kind == "single":
        local.run(RANKS, on_ranks, timeout_s=DEADLINE_S)
    else:
        on_ranks(commrt.init())
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m commrt.examples.kfac", None, about)
    parser.add_argument("--target", type=float, default=0.05, help="the loss to reach")
    parser.add_argument("--most", type=int, default=300, help="steps of a run")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each setting")
    parser.add_argument("--last", type=int, default=3, help="runs of the best")
    found = parser.parse_args(argv)
    for name in ("target", "most", "seeds", "last"):
        if getattr(found, name) <= 0:
            parser.error(f"--{name} {getattr(found, name)}: expected a number above 0")
    return found


def _table(comm: Communicator, arguments: argparse.Namespace) -> None:
    def say(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    def runs(setting: Setting, seeds: range) -> list[int]:
        return [
            steps_to(comm, setting, seed, arguments.target, arguments.most)
            for seed in seeds
        ]

    seeds = range(arguments.seeds)
    say(
        f"steps to a loss of {arguments.target}, at most {arguments.most}, on "
        f"{comm.size} ranks; mean of {len(seeds)} seeds"
    )
    best = []
    for settings in (SGD, K_FAC):
        found = {}
        for setting in settings:
            found[setting] = sum(runs(setting, seeds)) / len(seeds)
            say(f"{setting!s:30} {found[setting]:7.1f}")
        best.append(min(found, key=lambda each: found[each]))
    others = range(arguments.seeds, arguments.seeds + arguments.last)
    say(f"the best of each, on {len(others)} other seeds")
    for setting in best:
        steps = runs(setting, others)
        mean = sum(steps) / len(steps)
        say(f"{setting!s:30} {mean:7.1f} ({min(steps)} to {max(steps)})")


if __name__ == "__main__":
    sys.exit(main())
