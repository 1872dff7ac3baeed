# SPDX-License-Identifier: Apache-2.0
"""A network learns handwritten digits with half the memory for saved tensors.

    torchrun --nproc-per-node 2 -m commrt.examples.out_of_core --check

Saved tensors go to a file of each rank and come back, are kept, or are recomputed, as a
plan says that is made at the beginning. Ranks have images of their own. Every step is
that of one process, which keeps all in memory.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from commrt.examples import runs
from commrt.examples.digits import load_tensors
from commrt.layers.out_of_core import FileFar, OutOfCore
from commrt.layers.spatial.windows import even_ranges

__all__ = ["blocks", "main"]

STEPS = 40
SEED = 1
BATCH = 120
BUDGET = 0.5
"""The part of the saved bytes for which there is memory."""


def blocks() -> nn.Sequential:
    """Return blocks of a convolutional network, in float64."""
    torch.manual_seed(SEED)
    made: list[nn.Module] = []
    widths = (1, 8, 8, 8, 8, 8, 4)
    for channels, width in itertools.pairwise(widths):
        convolution = nn.Conv2d(channels, width, 3, padding=1)
        made.append(nn.Sequential(convolution, nn.Tanh()))
    made.append(nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, 10)))
    return nn.Sequential(*made).double()


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    arguments = runs.arguments_of("out_of_core", __doc__, STEPS, argv)
    with runs.job(arguments.backend):
        comm = getattr(dist.group.WORLD, "communicator", None)
        if comm is None:
            runs.say(f"backend {arguments.backend}: the layer needs commrt's")
            return 2
        network = blocks()
        initial = copy.deepcopy(network)
        places = even_ranges(BATCH, comm.size)
        low, high = places[comm.rank]
        pixels, _ = load_tensors()
        most = max(high - low for low, high in places)
        sample = pixels[:most].double()

        def together() -> list[float]:
            with (
                tempfile.TemporaryDirectory() as folder,
                FileFar(Path(folder) / "far") as far,
            ):
                whole = OutOfCore(
                    *(copy.deepcopy(network), sample),
                    budget_bytes=1 << 40,
                    far=far,
                    comm=comm,
                    policy="keep",
                )
                whole.close()
                model = OutOfCore(
                    *(network, sample),
                    budget_bytes=int(BUDGET * whole.plan.in_core_nbytes),
                    far=far,
                    comm=comm,
                )
                runs.say(str(model.plan))
                try:
                    return trained(model, arguments.steps, low, high, comm.size)
                finally:
                    model.close()

        def alone() -> list[float]:
            return trained(initial, arguments.steps, 0, BATCH, 1)

        return runs.report(together, alone if arguments.check else None)


def trained(
    model: nn.Module, steps: int, low: int, high: int, ranks: int
) -> list[float]:
    """Train on a part of each batch; return the mean losses of all images."""
    pixels, digits = load_tensors()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draws = torch.Generator().manual_seed(SEED)
    losses = []
    for _ in range(steps):
        batch = torch.randint(len(pixels), (BATCH,), generator=draws)[low:high]
        optimizer.zero_grad()
        logits = model(pixels[batch].double())
        # Ranks may have different numbers of images: a mean over ranks of such sums is
        # the mean over images.
        wrong = functional.cross_entropy(logits, digits[batch], reduction="sum")
        loss = wrong * ranks / BATCH
        if isinstance(model, OutOfCore):
            model.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if ranks == 1:
        return [float(loss) for loss in losses]
    return runs.mean_over_ranks(losses)


if __name__ == "__main__":
    sys.exit(main())
