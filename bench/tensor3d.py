# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel layers of commrt beside torch's, in one launch.

    torchrun --nproc-per-node 4 -m commrt.bench.tensor3d
    torchrun --nproc-per-node 1 -m commrt.bench.tensor3d
    torchrun --nproc-per-node 2 -m commrt.bench.tensor3d --grid z=2 --pairs 4

A step is the forward and the backward pass of two linear layers with GELU between them,
in Megatron-LM's form: the first one is cut by columns, the second one by rows. torch's
pair is made by ColwiseParallel and RowwiseParallel, once with process groups of commrt
and once with those of gloo. On one rank commrt's layers stand beside torch's Linear.
With ``--grid`` they stand beside themselves, with overlap and without: torch has no
such layers.
All ways are in one launch and take turns, block by block, so that they meet the same
machine. Times are medians over blocks, in microseconds, of rank 0. ``ratio`` is that of
commrt's time to each other one's, the median over blocks.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commrt.bench.in_process_group import report
from commrt.bench.step_turns import Step, in_turns, table
from commrt.errors import UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["main", "measure"]

SHAPES = ((64, 256, 1024), (512, 512, 2048), (1024, 1024, 4096))
"""Rows of the input, and features outside and inside of the pair."""
_BLOCKS = 15
Shape = tuple[int, int, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks that torchrun started."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.tensor3d")
    parser.add_argument(
        "--shape",
        type=_shape,
        action="append",
        help="ROWSxFEATURESxINNER, such as 512x512x2048; may be given several times",
    )
    parser.add_argument("--grid", type=_grid, help="axes and ranks, such as z=2,x=2")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of layers")
    parser.add_argument("--blocks", type=int, default=_BLOCKS, help="turns of each way")
    parser.add_argument("--out", help="write all times to this file")
    arguments = parser.parse_args(argv)
    shapes, blocks = arguments.shape or SHAPES, arguments.blocks
    more = {"grid": arguments.grid, "pairs": arguments.pairs, "blocks": blocks}
    report(lambda: measure(shapes, **more), _text, arguments.out)
    return 0


def _grid(text: str) -> dict[str, int]:
    axes = {}
    for word in text.split(","):
        name, _, ranks = word.partition("=")
        if not ranks.isdigit():
            raise ArgumentTypeError(f"{text}: expected axes and ranks, as z=2,x=2")
        axes[name] = int(ranks)
    return axes


def _shape(text: str) -> Shape:
    words = text.split("x")
    if len(words) != 3 or not all(word.isdigit() and int(word) for word in words):
        raise ArgumentTypeError(f"{text}: expected three numbers, as 512x512x2048")
    rows, outer, inner = map(int, words)
    return rows, outer, inner


def measure(
    shapes: Sequence[Shape],
    *,
    grid: dict[str, int] | None = None,
    pairs: int = 1,
    blocks: int = _BLOCKS,
    least_s: float = 0.05,
) -> list[dict[str, Any]]:
    """Return the times of blocks, in µs for a step, by shape and way."""
    import torch

    torch.set_num_threads(1)
    rows = []
    for shape in shapes:
        if grid is None:
            steps = _beside_torch(shape, pairs)
        else:
            steps = _with_overlap_and_without(shape, pairs, grid)
        times = in_turns(steps, blocks=blocks, least_s=least_s)
        rows.append({"shape": "x".join(map(str, shape)), "us": times})
    return rows


def _model(shape: Shape, pairs: int) -> Any:
    import torch
    from torch import nn

    _, outer, inner = shape
    torch.manual_seed(1)
    layers: list[Any] = []
    for _ in range(pairs):
        layers += [nn.Linear(outer, inner), nn.GELU(), nn.Linear(inner, outer)]
    return nn.Sequential(*layers)


def _beside_torch(shape: Shape, pairs: int) -> dict[str, Step]:
    import torch.distributed as dist

    from commrt.layers.process_grid import ProcessGrid
    from commrt.layers.tensor3d import parallelize

    serial = _model(shape, pairs)
    everyone: Any = dist.group.WORLD
    grid = ProcessGrid(everyone.communicator, {"x": 0})
    if shape[2] % grid.num_ranks:
        raise UsageError(
            f"--shape {'x'.join(map(str, shape))}: {shape[2]} features cannot be cut "
            f"into {grid.num_ranks} equal pieces, and torch's pair takes no other ones"
        )
    ways = {"commrt": parallelize(_copied(serial), grid)}
    if grid.num_ranks == 1:
        ways["torch"] = serial
    else:
        gloo = dist.new_group(backend="gloo")
        ways["torch on commrt"] = _torchs(serial, everyone)
        ways["torch on gloo"] = _torchs(serial, gloo)
    return _steps(ways, shape)


def _with_overlap_and_without(
    shape: Shape, pairs: int, axes: dict[str, int]
) -> dict[str, Step]:
    import torch.distributed as dist

    from commrt.layers.process_grid import ProcessGrid
    from commrt.layers.tensor3d import overlap_communication, parallelize

    everyone: Any = dist.group.WORLD
    grid = ProcessGrid(everyone.communicator, axes)
    ways = {
        name: parallelize(_model(shape, pairs), grid)
        for name in ("commrt", "without overlap")
    }
    overlap_communication(ways["commrt"])
    return _steps(ways, shape)


def _steps(ways: dict[str, Any], shape: Shape) -> dict[str, Step]:
    """Return a step of each way, once all have given equal gradients."""
    import torch

    torch.manual_seed(2)
    given = torch.randn(shape[0], shape[1])
    steps = {way: _step(model, given) for way, model in ways.items()}
    first, *others = (step() for step in steps.values())
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-4)
    return steps


def _copied(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


def _torchs(serial: Any, group: dist.ProcessGroup) -> Any:
    """Return the pair as torch cuts it."""
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = DeviceMesh.from_group(group, "cpu")
    plan: dict[str, Any] = {}
    for first in range(0, len(serial), 3):
        plan |= {f"{first}": ColwiseParallel(), f"{first + 2}": RowwiseParallel()}
    return parallelize_module(_copied(serial), mesh, plan)


def _step(model: Any, given: Any) -> Step:
    """Return a forward and a backward pass, which returns the input's gradient."""
    x = given.clone().requires_grad_()

    def step() -> Any:
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()
        return x.grad

    return step


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return table(rows, "shape")


if __name__ == "__main__":
    sys.exit(main())
