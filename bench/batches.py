# SPDX-License-Identifier: Apache-2.0
"""Layers on a batch that is cut over ranks, beside the same layers on DTensors.

    torchrun --nproc-per-node 2 -m commrt.bench.batches

A step is the forward and the backward pass of torch's own modules. The batch is cut,
and weights are whole on every rank. In the end each rank has the whole gradient of each
weight: DTensor leaves it as a sum that is to be made, so its step makes it. DTensor
runs once with process groups of commrt and once with those of gloo. On batches its
convolutions are right; where space is cut they are not (docs/explanation/
layers-compared.md). All ways take turns, block by block. ``ratio`` is that of commrt's
time to each other one's, the median over blocks.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from commrt.bench.in_process_group import measure_models
from commrt.bench.step_turns import Step, in_turns, table

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["WORKLOADS", "main", "measure"]

Model = tuple[Any, tuple[int, ...]]


def _convolution() -> Model:
    from torch import nn

    return nn.Conv2d(32, 32, 3, padding=1), (8, 32, 28, 28)


def _small_convolution() -> Model:
    from torch import nn

    return nn.Conv2d(4, 8, 3, padding=1), (4, 4, 8, 8)


def _network() -> Model:
    from torch import nn

    layers: list[Any] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10)), (16, 3, 32, 32)


def _volume() -> Model:
    from torch import nn

    layers = nn.Conv3d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1)
    return nn.Sequential(*layers), (2, 2, 16, 16, 16)


def _linear() -> Model:
    from torch import nn

    layers = nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)
    return nn.Sequential(*layers), (128, 256)


WORKLOADS: dict[str, Callable[[], Model]] = {
    "convolution": _convolution,
    "small-convolution": _small_convolution,
    "network": _network,
    "volume": _volume,
    "linear": _linear,
}
"""By name: a function that returns a model and the shape of its input."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks that torchrun started."""
    program = "commrt.bench.batches"
    return measure_models(program, WORKLOADS, measure, _text, argv)


def measure(
    wanted: Sequence[str], blocks: int, *, least_s: float = 0.05
) -> list[dict[str, Any]]:
    """Return the times of blocks, in µs for a step, by workload and way."""
    import torch
    import torch.distributed as dist

    from commrt.layers.process_grid import ProcessGrid

    torch.set_num_threads(1)
    everyone: Any = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    grid = ProcessGrid(everyone.communicator, {"data": 0})
    rows = []
    for name in wanted:
        torch.manual_seed(1)
        model, shape = WORKLOADS[name]()
        batch = torch.randn(shape)
        steps = {
            "commrt": _by_commrt(copy.deepcopy(model), batch, grid),
            "DTensor on commrt": _by_dtensor(copy.deepcopy(model), batch, everyone),
            "DTensor on gloo": _by_dtensor(copy.deepcopy(model), batch, gloo),
        }
        first, *others = (step() for step in steps.values())
        for other in others:
            for mine, right in zip(first, other, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)
        times = in_turns(steps, blocks=blocks, least_s=least_s)
        rows.append({"workload": name, "us": times})
    return rows


def _by_commrt(model: Any, batch: Any, grid: Any) -> Step:
    """Return a step that returns the whole gradients of the weights."""
    from commrt.layers.tensors import DistTensor, Placement

    dims = ["data", *[None] * (batch.dim() - 1)]
    x = DistTensor.from_whole(batch, grid, Placement(*dims))

    def step() -> Any:
        model.zero_grad()
        model(x).square().sum().redistribute().backward()
        return [parameter.grad for parameter in model.parameters()]

    return step


def _by_dtensor(model: Any, batch: Any, group: dist.ProcessGroup) -> Step:
    """Return the same step on DTensors."""
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import (
        Replicate,
        Shard,
        distribute_module,
        distribute_tensor,
    )

    mesh = DeviceMesh.from_group(group, "cpu")
    model = distribute_module(model, mesh)
    x = distribute_tensor(batch, mesh, [Shard(0)])

    def step() -> Any:
        model.zero_grad()
        model(x).square().sum().backward()
        whole = []
        for parameter in model.parameters():
            parameter.grad = parameter.grad.redistribute(mesh, [Replicate()])
            whole.append(parameter.grad.to_local())
        return whole

    return step


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return table(rows, "workload")


if __name__ == "__main__":
    sys.exit(main())
