# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts learns handwritten digits, with experts on different ranks.

    torchrun --nproc-per-node 2 -m commrt.examples.experts --check

Seven experts lie on the ranks of a grid, and each image goes to two of them. Ranks have
images of their own. On four ranks pairs of them share each expert. Every step is that
of one process, whose network is written in torch alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from commrt.comm import Communicator
from commrt.examples import runs
from commrt.examples.digits import load_digits
from commrt.layers.experts import (
    MoE,
    broadcast_parameters,
    state_dict,
    sync_gradients,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_ranges

__all__ = ["Network", "main"]

STEPS = 60
SEED = 1
BATCH = 100
WIDTH, HIDDEN, EXPERTS, TOP_K = 32, 24, 7, 2
WEIGHTS = ("gate", "up", "down")
BALANCE = 0.01
"""The factor of the load-balancing loss (Fedus et al., "Switch Transformers")."""


class Network(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Some 22,000 parameters, most of them of the experts."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        # In float64, so that rounding sends no image to another expert.
        self.first = nn.Linear(64, WIDTH, dtype=torch.float64)
        self.mixture = mixture
        self.last = nn.Linear(WIDTH, 10, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ten numbers for each image, and the load-balancing loss."""
        hidden = self.first(x).tanh()
        output, balance, *_ = self.mixture(hidden)
        return self.last(hidden + output), balance


class PlainMixture(nn.Module):  # type: ignore[misc]
    """A mixture in torch alone, which the layer's must equal: a loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.float64)
        self.experts = nn.ParameterDict(
            {
                name: torch.empty(EXPERTS, HIDDEN, WIDTH, dtype=torch.float64)
                for name in WEIGHTS
            }
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the load-balancing loss."""
        likely = self.router(x).softmax(-1)
        weights, chosen = likely.topk(TOP_K)
        y = torch.zeros_like(x)
        for number in range(EXPERTS):
            tokens, slots = (chosen == number).nonzero(as_tuple=True)
            gate, up, down = (self.experts[name][number] for name in WEIGHTS)
            hidden = functional.silu(x[tokens] @ gate.T) * (x[tokens] @ up.T)
            y = y.index_add(0, tokens, (hidden @ down) * weights[tokens, slots, None])
        counts = torch.bincount(chosen.reshape(-1), minlength=EXPERTS)
        part = counts.double() / chosen.numel()
        return y, EXPERTS * (part * likely.mean(0)).sum()


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    arguments = runs.arguments_of("experts", __doc__, STEPS, argv)
    with runs.job(arguments.backend):
        comm = getattr(dist.group.WORLD, "communicator", None)
        if comm is None:
            runs.say(f"backend {arguments.backend}: the layer needs commrt's")
            return 2
        with ProcessGrid(comm, axes_of(comm)) as grid:
            torch.manual_seed(SEED)
            sizes = WIDTH, EXPERTS, HIDDEN
            network = Network(MoE(*sizes, grid=grid, top_k=TOP_K, dtype=torch.float64))
            broadcast_parameters(network)
            initial = state_dict(network)

            def together() -> list[float]:
                return trained(network, grid, arguments.steps)

            def alone() -> list[float]:
                other = Network(PlainMixture())
                other.load_state_dict(initial)
                return trained(other, None, arguments.steps)

            return runs.report(together, alone if arguments.check else None)


def axes_of(comm: Communicator) -> dict[str, int]:
    """Return the axes of a grid: pairs of ranks share experts where there are four."""
    tensor = 2 if comm.size > 2 and comm.size % 2 == 0 else 1
    return {"data": 1, "expert": 0, "tensor": tensor}


def trained(network: nn.Module, grid: ProcessGrid | None, steps: int) -> list[float]:
    """Train on the ranks of a grid, or on one process alone; return the losses."""
    images, digits = load_digits()
    pixels = torch.from_numpy(images.reshape(len(images), -1) / 16.0).double()
    target = torch.from_numpy(digits.astype("int64"))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(SEED)
    places = 1 if grid is None else grid.size(("data", "expert"))
    place = 0 if grid is None else grid.place(("data", "expert"))
    low, high = even_ranges(BATCH, places)[place]
    losses: list[Any] = []
    for _ in range(steps):
        batch = torch.randint(len(pixels), (BATCH,), generator=draws)
        own = batch[low:high]  # ranks may have different numbers of images
        optimizer.zero_grad()
        logits, balance = network(pixels[own])
        wrong = functional.cross_entropy(logits, target[own], reduction="sum") / BATCH
        # Each rank adds its part of the losses, and gradients are summed.
        loss = wrong + BALANCE * balance / places
        loss.backward()
        if grid is not None:
            sync_gradients(network, average=False)
        optimizer.step()
        losses.append(loss.detach())
    if grid is None:
        return [float(loss) for loss in losses]
    total = torch.stack(losses)
    grid[("data", "expert")].allreduce(total)
    return [float(loss) for loss in total]


if __name__ == "__main__":
    sys.exit(main())
