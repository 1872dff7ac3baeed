# SPDX-License-Identifier: Apache-2.0
"""A step of a pipeline without a schedule beside torch's 1F1B, in one launch.

    torchrun --nproc-per-node 4 -m commrt.bench.pipeline
    torchrun --nproc-per-node 2 -m commrt.bench.pipeline --workload compute

A step is forward and back of 16 micro-batches, without an optimizer. Stages sleep
instead of computing, as a rank does whose device computes, but for ``compute``. In
``even`` a forward pass takes 2 ms and a backward pass 4 ms; in ``unequal`` 1, 2, 0.5
and 1.5 times that by stage; in ``varying`` 0.25 to 1.75 times, drawn for each stage and
micro-batch; in ``tiny`` a hundredth. Stages of ``compute`` are perceptrons with 3, 1, 2
and 1 layers of 512 features, which need a core for each rank. Ways:
``MessageDrivenPipeline``, also with half as many micro-batches in flight; torch's
``Schedule1F1B`` on commrt's process group, and on one of gloo. All ways take turns,
block by block. Gradients are compared before anything is timed. Times are medians over
blocks, in microseconds, of rank 0. ``ratio`` is that of the first way's time to each
other one's, the median over blocks.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commrt.bench.in_process_group import measure_models
from commrt.bench.step_turns import Step, in_turns, table
from commrt.errors import UsageError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from commrt.comm import Communicator

__all__ = ["WORKLOADS", "main", "measure"]

MICRO_BATCHES, SAMPLES = 16, 16
FORWARD_S, BACKWARD_S = 2e-3, 4e-3
WIDTH, COMPUTED_WIDTH = 64, 512


class Workload(NamedTuple):
    """How long stages take."""

    factors: tuple[float, ...]
    """Of each stage in turn: its time, or with ``computes`` its layers."""
    spread: float = 0.0
    """Largest relative deviation of a micro-batch's time."""
    computes: bool = False
    unit_s: float = 1.0
    """Of the sleeps."""


WORKLOADS = {
    "tiny": Workload((1.0, 2.0), 0.5, unit_s=0.01),
    "even": Workload((1.0,)),
    "unequal": Workload((1.0, 2.0, 0.5, 1.5)),
    "varying": Workload((1.0,), 0.75),
    "compute": Workload((3, 1, 2, 1), computes=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table, on the ranks that torchrun started."""
    return measure_models("commrt.bench.pipeline", WORKLOADS, measure, _text, argv)


def measure(
    wanted: Sequence[str], blocks: int, *, least_s: float = 0.5
) -> list[dict[str, Any]]:
    """Return the times of blocks, in µs for a step, by workload and way."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    everyone: Any = dist.group.WORLD
    if dist.get_world_size() == 1:
        raise UsageError("pipeline: 1 rank; start two at least, one for each stage")
    gloo = dist.new_group(backend="gloo")
    rows = []
    for name in wanted:
        workload = WORKLOADS[name]
        comm = everyone.communicator
        size: int = comm.size
        ways = {
            "commrt": _driven(workload, comm, None),
            "half in flight": _driven(workload, comm, size),
            "1F1B on commrt": _scheduled(workload, everyone),
            "1F1B on gloo": _scheduled(workload, gloo),
        }
        right, *others = [way.gradients() for way in ways.values()]
        for other in others:
            torch.testing.assert_close(right, other, rtol=1e-4, atol=1e-6)
        steps = {way: each.step for way, each in ways.items()}
        times = in_turns(steps, blocks=blocks, least_s=least_s)
        rows.append({"workload": name, "us": times})
    return rows


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return table(rows, "workload")


class _Way(NamedTuple):
    stage: nn.Module
    step: Step

    def gradients(self) -> list[Any]:
        """Return the gradients of one step."""
        self.stage.zero_grad()
        self.step()
        found = [each.grad.clone() for each in self.stage.parameters()]
        self.stage.zero_grad()
        return found


def _stage(workload: Workload, number: int) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(number)
    factor = workload.factors[number % len(workload.factors)]
    if workload.computes:
        made: list[nn.Module] = []
        for _ in range(int(factor)):
            made += [nn.Linear(COMPUTED_WIDTH, COMPUTED_WIDTH), nn.Tanh()]
        return nn.Sequential(*made)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), _sleeping(workload, number, factor))


def _sleeping(workload: Workload, number: int, factor: float) -> nn.Module:
    import torch
    from torch import nn

    draws = random.Random(number)

    class Sleep(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, scale: float) -> Any:
            ctx.scale = scale
            time.sleep(FORWARD_S * scale)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
            time.sleep(BACKWARD_S * ctx.scale)
            return gradient, None

    class Sleeping(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            off = workload.spread * draws.uniform(-1, 1)
            return Sleep.apply(x, workload.unit_s * factor * (1 + off))

    return Sleeping()


def _given(workload: Workload) -> tuple[Any, Any]:
    import torch

    draws = torch.Generator().manual_seed(1)
    width = COMPUTED_WIDTH if workload.computes else WIDTH
    shape = MICRO_BATCHES * SAMPLES, width
    x, target = (torch.randn(shape, generator=draws) for _ in range(2))
    return x, target


def _driven(workload: Workload, comm: Communicator, in_flight: int | None) -> _Way:
    from torch.nn import functional

    from commrt.layers.pipeline import MessageDrivenPipeline

    stage = _stage(workload, comm.rank)
    loss_fn = functional.mse_loss
    pipeline = MessageDrivenPipeline(stage, comm, loss_fn, in_flight=in_flight)
    x, target = _given(workload)
    micro = x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES)
    return _Way(stage, lambda: pipeline.step(*micro))


def _scheduled(workload: Workload, group: dist.ProcessGroup) -> _Way:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    stage = _stage(workload, rank)
    placed = PipelineStage(stage, rank, size, torch.device("cpu"), group=group)
    runner = Schedule1F1B(placed, MICRO_BATCHES, loss_fn=functional.mse_loss)
    x, target = _given(workload)

    def step() -> None:
        if rank == 0:
            runner.step(x)
        elif rank < size - 1:
            runner.step()
        else:
            runner.step(target=target, losses=[])

    return _Way(stage, step)


if __name__ == "__main__":
    sys.exit(main())
