# SPDX-License-Identifier: Apache-2.0
"""Layers on a grid of one rank, beside torch's own: what they cost before a cut.

    torchrun --nproc-per-node 1 -m commrt.bench.one_rank

A step is the forward and the backward pass of a model of torch, on one thread.
``layers`` is the model after ``parallelize_cnn``, or after ``tensor3d.parallelize`` if
it is of linear layers; ``tensors`` is torch's own model on a ``DistTensor``. All ways
take turns, block by block. ``ratio`` is that of a way's time to torch's, the median
over blocks. Gradients are compared bit for bit before anything is timed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from commrt.bench.batches import WORKLOADS as BATCHES
from commrt.bench.in_process_group import measure_models
from commrt.bench.spatial import WORKLOADS as SAMPLES
from commrt.bench.step_turns import Step, in_turns
from commrt.errors import UsageError

if TYPE_CHECKING:
    from commrt.layers.process_grid import ProcessGrid

__all__ = ["WORKLOADS", "main", "measure"]

Model = tuple[Any, tuple[int, ...]]


def _sample(name: str, scale: int) -> Callable[[], Model]:
    def model() -> Model:
        made, shape, _ = SAMPLES[name](scale)
        return made, shape

    return model


WORKLOADS: dict[str, Callable[[], Model]] = {
    **BATCHES,
    "resnet-50": _sample("resnet-50", 4),
    "unet-3d": _sample("unet-3d", 3),
}
"""By name: a function that returns a model and the shape of its input."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table, on the one rank that torchrun started."""
    program = "commrt.bench.one_rank"
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
    grid = ProcessGrid(everyone.communicator, {"data": 0})
    if grid.num_ranks != 1:
        raise UsageError(f"one_rank: {grid.num_ranks} ranks; start one")
    rows = []
    for name in wanted:
        torch.manual_seed(1)
        model, shape = WORKLOADS[name]()
        given = torch.randn(shape)
        steps = {way: step(copy.deepcopy(model), given, grid) for way, step in _WAYS}
        right, *others = (step() for step in steps.values())
        for other in others:
            for plain, own in zip(right, other, strict=True):
                torch.testing.assert_close(own, plain, rtol=0, atol=0)
        times = in_turns(steps, blocks=blocks, least_s=least_s)
        rows.append({"workload": name, "us": times})
    return rows


def _by_torch(model: Any, given: Any, grid: ProcessGrid) -> Step:
    """Return a step that returns the gradients of the weights."""

    def step() -> Any:
        model.zero_grad()
        model(given).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    return step


def _by_layers(model: Any, given: Any, grid: ProcessGrid) -> Step:
    """Return the step of a model whose layers are commrt's."""
    from commrt.layers.cnn import parallelize_cnn
    from commrt.layers.tensor3d import parallelize

    if given.dim() > 2:
        model = parallelize_cnn(model, grid, outputs="whole")
    else:
        model = parallelize(model, grid)
    return _by_torch(model, given, grid)


def _by_tensors(model: Any, given: Any, grid: ProcessGrid) -> Step:
    """Return the step of torch's own modules on a tensor that may be cut."""
    from commrt.layers.tensors import DistTensor, Placement

    x = DistTensor.from_whole(given, grid, Placement.replicated(given.dim()))

    def step() -> Any:
        model.zero_grad()
        model(x).square().sum().redistribute().backward()
        return [parameter.grad for parameter in model.parameters()]

    return step


_WAYS = ("torch", _by_torch), ("layers", _by_layers), ("tensors", _by_tensors)


def _text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'µs for a step':<20}{'torch':>12}"]
    lines[0] += "".join(f"{way:>12}{'ratio':>8}" for way, _ in _WAYS[1:])
    for row in rows:
        times = row["us"]
        plain = times["torch"]
        text = f"{row['workload']:<20}{median(plain):>12.1f}"
        for way, _ in _WAYS[1:]:
            pairs = zip(times[way], plain, strict=True)
            ratio = median(mine / other for mine, other in pairs)
            text += f"{median(times[way]):>12.1f}{ratio:>8.3f}"
        lines.append(text)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
