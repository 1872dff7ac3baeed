# SPDX-License-Identifier: Apache-2.0
"""Steps of DDP by its own calls, by the hook, and by the hook with shared buckets.

    torchrun --nproc-per-node 2 tests/pytorch/bucket_cost.py

A model of 12 million parameters (48 MiB of gradients) that computes next to nothing, so
that a step is its communication. The three take turns; medians in milliseconds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commrt.layers.data.ddp import HookState, reduce_bucket

STEPS = 20
SETTLED = 5


class Sums(nn.Module):
    """The sum of twelve long parameters, times an input."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.ParameterList(torch.zeros(1 << 20) for _ in range(12))

    def forward(self, x: float) -> torch.Tensor:
        return torch.stack([(each * x).sum() for each in self.long]).sum()


def made(symmetric: bool | None) -> Any:
    """Return a model; ``symmetric`` is the hook's, None for no hook."""
    model = DistributedDataParallel(Sums())
    if symmetric is not None:
        model.register_comm_hook(HookState(symmetric=symmetric), reduce_bucket)
    return model


def main() -> None:
    """Print what a step takes."""
    torch.set_num_threads(1)
    dist.init_process_group("commrt")
    rank, size = dist.get_rank(), dist.get_world_size()
    models = {
        "DDP": made(None),
        "the hook": made(False),
        "the hook, shared buckets": made(True),
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(STEPS):
        for name, model in models.items():
            model.zero_grad(set_to_none=False)
            dist.barrier()
            start = time.perf_counter()
            model(1.0 + rank).backward()
            times[name].append(time.perf_counter() - start)
            gradient = model.module.long[3].grad
            assert torch.allclose(gradient, torch.tensor((1 + size) / 2)), gradient
    if rank == 0:
        for name, each in times.items():
            print(f"{name:26}{statistics.median(each[SETTLED:]) * 1e3:8.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
