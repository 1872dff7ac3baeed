# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits are learnt with an optimizer that is divided among the ranks.

    torchrun --nproc-per-node 2 -m commrt.examples.sharded_digits --check

Each rank has a whole model and images of its own. AdamW's state lies in parts on the
ranks. Gradients are clipped by their norm over all ranks. Every step is that of one
process with the plain optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from commrt.comm import Communicator
from commrt.examples import runs
from commrt.examples.digits import load_digits
from commrt.layers.sharded_update import ShardedOptimizer
from commrt.layers.spatial.windows import even_ranges

__all__ = ["main"]

STEPS = 60
SEED = 1
BATCH = 100
LR, MAX_NORM = 3e-3, 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    arguments = runs.arguments_of("sharded_digits", __doc__, STEPS, argv)
    with runs.job(arguments.backend):
        comm = getattr(dist.group.WORLD, "communicator", None)
        if comm is None:
            runs.say(f"backend {arguments.backend}: the optimizer needs commrt's")
            return 2

        def together() -> list[float]:
            return trained(comm, arguments.steps)

        def alone() -> list[float]:
            return trained(None, arguments.steps)

        return runs.report(together, alone if arguments.check else None)


def network() -> nn.Module:
    """Return a perceptron of some 85,000 parameters, in float64."""
    torch.manual_seed(SEED)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(256, 10)).double()


def trained(comm: Communicator | None, steps: int) -> list[float]:
    """Train on ranks, or on one process by the plain optimizer; return the losses."""
    images, digits = load_digits()
    pixels = torch.from_numpy(images.reshape(len(images), -1) / 16.0).double()
    target = torch.from_numpy(digits.astype("int64"))
    model = network()
    plain: torch.optim.AdamW | None = None
    sharded: ShardedOptimizer | None = None
    low, high = 0, BATCH
    if comm is None:
        plain = torch.optim.AdamW(model.parameters(), lr=LR)
    else:
        low, high = even_ranges(BATCH, comm.size)[comm.rank]
        sharded = ShardedOptimizer(
            model.parameters(), comm, torch.optim.AdamW, op="sum", lr=LR
        )
    draws = torch.Generator().manual_seed(SEED)
    losses = []
    for _ in range(steps):
        own = torch.randint(len(pixels), (BATCH,), generator=draws)[low:high]
        model.zero_grad()
        # Each rank adds its part of the loss, and gradients are summed.
        wrong = functional.cross_entropy(
            model(pixels[own]), target[own], reduction="sum"
        )
        loss = wrong / BATCH
        loss.backward()
        if sharded is not None:
            sharded.clip_grad_norm_(MAX_NORM)
            sharded.step()
        elif plain is not None:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            plain.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if comm is not None and sharded is not None:
        comm.allreduce(total)
        sharded.close()
    return [float(loss) for loss in total]


if __name__ == "__main__":
    sys.exit(main())
