# SPDX-License-Identifier: Apache-2.0
"""A script written for Horovod learns handwritten digits, with another import.

    torchrun --nproc-per-node 2 -m commrt.examples.horovod_digits --check

Only the import names commrt: with Horovod it is ``import horovod.torch as hvd``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import commrt.hvd as hvd
from commrt.examples.digits import load_digits
from commrt.layers.spatial.windows import even_ranges

__all__ = ["main"]

BATCH = 90
TOLERANCE = 1e-9


def network() -> nn.Module:
    """Return the network, in float64 so that ranks and one process agree closely."""
    torch.manual_seed(1)
    layers = nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10)
    return nn.Sequential(*layers).double()


def batches(steps: int) -> list[tuple[Any, Any]]:
    """Return the images and digits of each step, the same on all ranks."""
    images, digits = load_digits()
    pixels = torch.from_numpy(images.reshape(len(images), -1) / 16.0).double()
    target = torch.from_numpy(digits.astype("int64"))
    draws = torch.Generator().manual_seed(2)
    found = []
    for _ in range(steps):
        chosen = torch.randint(len(pixels), (BATCH,), generator=draws)
        found.append((pixels[chosen], target[chosen]))
    return found


def trained(steps: int) -> list[float]:
    """Train on all ranks; return the loss of each step."""
    torch.set_num_threads(1)  # ranks share the cores
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Sum
    )
    low, high = even_ranges(BATCH, hvd.size())[hvd.rank()]
    losses = []
    for images, digits in batches(steps):
        optimizer.zero_grad()
        scores = model(images[low:high])
        # Ranks may have different numbers of images: each adds its part of the mean.
        loss = functional.cross_entropy(scores, digits[low:high], reduction="sum")
        loss = loss / BATCH
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss", op=hvd.Sum).item())
    return losses


def alone(steps: int) -> list[float]:
    """Train in one process with torch alone; return the loss of each step."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    losses = []
    for images, digits in batches(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that a launcher has started; return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m commrt.examples.horovod_digits")
    parser.description = about
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer")
    parser.add_argument(
        "--check", action="store_true", help="compare with one process, step by step"
    )
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: expected a number from 1")
    hvd.init()
    losses = trained(arguments.steps)
    right = alone(arguments.steps) if arguments.check else losses
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, right, strict=True))
    if hvd.rank() == 0:
        print(f"{len(losses)} steps on {hvd.size()} ranks")
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
        if arguments.check:
            print(f"against one process: off by at most {off:.1e} of the loss")
    hvd.shutdown()
    return 0 if off <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
