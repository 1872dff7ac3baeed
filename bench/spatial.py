# SPDX-License-Identifier: Apache-2.0
"""A training step of one sample that is cut in space, beside one process.

    python -m commrt.run -n 2 -m commrt.bench.spatial

A stack of residual blocks on a picture of 512 x 512, and a 3-d U-Net on a volume of 96
voxels a side, one sample each. One process computes the whole step while the others
wait, and then all compute it, cut in height or depth, step by step in turn, so that
both meet the same machine. A step's time is that of the slowest rank; figures are
medians over turns. Each process has one thread. The same is said of the time that its
thread has run on any core, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.in_process_group import names_of

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["WORKLOADS", "main", "measure"]

_TURNS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks of a launcher."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.spatial")
    parser.add_argument(
        "--workload",
        type=names_of(WORKLOADS),
        default=list(WORKLOADS),
        help="what to train",
    )
    parser.add_argument("--turns", type=int, default=_TURNS, help="steps of each way")
    arguments = parser.parse_args(argv)
    import torch

    import commrt

    torch.set_num_threads(1)
    with commrt.init() as comm:
        rows = measure(comm, arguments.workload, turns=arguments.turns)
        if comm.rank == 0:
            sys.stdout.write(_text(rows))
    return 0


def measure(
    comm: Communicator, wanted: Sequence[str], *, turns: int = _TURNS, scale: int = 1
) -> list[dict[str, Any]]:
    """Return milliseconds of a step, whole and cut, by workload; collective.

    Args:
        comm: the ranks.
        wanted: names of workloads.
        turns: timed steps of each way; one more before them is not timed.
        scale: divides the sides of samples, for tests.
    """
    rows = []
    for name in wanted:
        whole, cut = _ways(comm, name, scale)
        times: dict[str, list[float]] = {"one process": [], "cut": []}
        busy: dict[str, list[float]] = {"one process": [], "cut": []}
        for turn in range(turns + 1):
            for way, step in (("one process", whole), ("cut", cut)):
                comm.barrier()
                begin, cpu = time.perf_counter(), time.thread_time()
                if way == "cut" or comm.rank == 0:
                    step()
                ends = time.perf_counter() - begin, time.thread_time() - cpu
                took = np.array(ends) * 1e3
                comm.allreduce(took, op="max")
                if turn:
                    times[way].append(float(took[0]))
                    busy[way].append(float(took[1]))
        row = {"workload": name, "ranks": comm.size, "ms": times, "cpu_ms": busy}
        rows.append(row)
    return rows


def _ways(
    comm: Communicator, name: str, scale: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a step of one process, and one of all ranks."""
    import torch

    from commrt.layers.cnn import ParallelStrategy, parallelize_cnn
    from commrt.layers.process_grid import ProcessGrid

    torch.manual_seed(1)
    model, shape, role = WORKLOADS[name](scale)
    x = torch.randn(shape)
    grid = ProcessGrid(comm, {"space": 0})
    strategy = ParallelStrategy(**{role: "space"})
    mine = parallelize_cnn(copy.deepcopy(model), grid, strategy)

    def whole() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def cut() -> None:
        mine.zero_grad()
        mine(x).square().mean().redistribute().backward()

    return whole, cut


def _residual(scale: int) -> tuple[Any, tuple[int, ...], str]:
    """Return the stages of a ResNet-50 on a picture, and what is cut."""
    from torch import nn

    class Bottleneck(nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, planes: int, stride: int) -> None:
            super().__init__()
            outputs = 4 * planes
            layers: list[Any] = []
            steps = ((inputs, planes, 1, 1), (planes, planes, 3, stride))
            for taken, made, kernel, step in steps:
                conv = nn.Conv2d(taken, made, kernel, step, kernel // 2, bias=False)
                layers += [conv, nn.BatchNorm2d(made), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(planes, outputs, 1, bias=False)]
            self.inner = nn.Sequential(*layers, nn.BatchNorm2d(outputs))
            self.beside = nn.Identity()
            if stride != 1 or inputs != outputs:
                conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
                self.beside = nn.Sequential(conv, nn.BatchNorm2d(outputs))

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.inner(x) + self.beside(x))

    layers: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for planes, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inputs, planes, 1 if number else stride))
            inputs = 4 * planes
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers), (1, 3, 512 // scale, 512 // scale), "height"


def _unet(scale: int) -> tuple[Any, tuple[int, ...], str]:
    """Return a 3-d U-Net of 16 to 128 channels on a volume, and what is cut."""
    import torch
    from torch import nn

    def pair(inputs: int, outputs: int) -> Any:
        layers: list[Any] = []
        for taken in (inputs, outputs):
            conv = nn.Conv3d(taken, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    class UNet(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            widths = (16, 32, 64, 128)
            ends = zip((1, *widths), widths, strict=False)
            self.down = nn.ModuleList(pair(a, b) for a, b in ends)
            back = [*zip(widths[1:], widths, strict=False)][::-1]
            self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in back)
            self.join = nn.ModuleList(pair(2 * b, b) for _, b in back)
            self.pool, self.last = nn.MaxPool3d(2), nn.Conv3d(16, 3, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for number, layer in enumerate(self.down):
                x = layer(self.pool(x) if number else x)
                kept.append(x)
            for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
                x = join(torch.cat([skip, up(x)], dim=1))
            return self.last(x)

    return UNet(), (1, 1, *[96 // scale] * 3), "depth"


WORKLOADS: dict[str, Callable[[int], tuple[Any, tuple[int, ...], str]]] = {
    "resnet-50": _residual,
    "unet-3d": _unet,
}
"""Each makes a model, the shape of its sample, and the role of the axis."""


def _text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'ms for a step':<22}{'ranks':>6}{'one process':>14}{'cut':>10}{'ratio':>8}"
    ]
    for row in rows:
        for clock, label in (("ms", ""), ("cpu_ms", ", on cores")):
            one, cut = (median(row[clock][way]) for way in ("one process", "cut"))
            numbers = f"{one:>14.1f}{cut:>10.1f}{cut / one:>8.3f}"
            lines.append(f"{row['workload'] + label:<22}{row['ranks']:>6}{numbers}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
