# SPDX-License-Identifier: Apache-2.0
"""torch's schedules run on cuts of commrt, and so does the example of pipelines."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from commrt.examples import pipeline
from commrt.layers.pipeline import MessageDrivenPipeline, partition, split

DEADLINE_S = 300.0
SCHEDULES = (
    *("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble"),
)
COSTS = [6, 1, 2, 1, 1, 4, 1, 1, 1, 1, 1, 1, 1, 1]
MICRO_BATCHES = 8


def model() -> nn.Sequential:
    torch.manual_seed(21)
    inside = [nn.Linear(6, 6) for _ in range(len(COSTS) - 1)]
    return nn.Sequential(nn.Linear(8, 6), *inside).double()


def mean_square(y: Any, target: Any) -> Any:
    return (y - target).square().mean()


def by_one_process(x: Any, target: Any) -> tuple[float, nn.Module]:
    alone = model()
    loss = mean_square(alone(x), target)
    loss.backward()
    return float(loss.detach()), alone


def wrong_ones(name: str, parts: list[Any], loss: float, right: Any) -> list[str]:
    """Return what differs from one process."""
    expected, alone = right
    gradients = {key: each.grad for key, each in alone.named_parameters()}
    found = [] if abs(loss - expected) < 1e-12 else [f"{name}: loss {loss}, {expected}"]
    for part in parts:
        for key, each in part.named_parameters():
            if not torch.allclose(each.grad, gradients[key], rtol=1e-12, atol=1e-12):
                found.append(f"{name}: gradient of {key}")
    return found


def all_schedules() -> list[str]:
    dist.init_process_group("commrt")
    rank, size = dist.get_rank(), dist.get_world_size()
    draws = torch.Generator().manual_seed(22)
    x = torch.randn(16, 8, generator=draws, dtype=torch.float64)
    target = torch.randn(16, 6, generator=draws, dtype=torch.float64)
    right = by_one_process(x, target)
    speeds = [1.0 + place % 2 for place in range(size)]
    found = []
    for name in SCHEDULES:
        kind = get_schedule_class(name)
        is_single = issubclass(kind, PipelineScheduleSingle)
        num_stages = size if is_single else 2 * size
        numbers = [*range(rank, num_stages, size)]
        if name == "ZBVZeroBubble":
            numbers = [rank, num_stages - 1 - rank]
        rounds = 1 if is_single else 2
        cut = partition(COSTS, speeds * rounds, order="given")
        parts = [split(model(), cut.ranges, number) for number in numbers]
        stages = [
            PipelineStage(part, number, num_stages, torch.device("cpu"))
            for part, number in zip(parts, numbers, strict=True)
        ]
        given: Any = stages[0] if is_single else stages
        runner = kind(given, MICRO_BATCHES, loss_fn=mean_square)
        losses: list[Any] = []
        more: dict[str, Any] = {}
        if num_stages - 1 in numbers:
            more = {"target": target, "losses": losses}
        runner.step(*((x,) if 0 in numbers else ()), **more)
        loss = (
            torch.stack(losses).mean().detach() if losses else torch.zeros(1).double()
        )
        total = loss.reshape(1).clone()
        dist.all_reduce(total)
        found += wrong_ones(name, parts, float(total), right)
    comm: Any = dist.group.WORLD.communicator
    stage = split(model(), partition(COSTS, speeds, order="given").ranges, rank)
    with MessageDrivenPipeline(stage, comm, mean_square) as driven:
        loss = driven.step(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES))
    found += wrong_ones("messages", [stage], loss, right)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_schedules_of_torch_run_with_partitions(torchrun: Any, ranks: int) -> None:
    got = torchrun(ranks, all_schedules, deadline_s=DEADLINE_S)
    assert got == [[]] * ranks


def example(arguments: list[str]) -> list[Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pipeline.main(arguments)
    return [status, said.getvalue()]


@pytest.mark.parametrize("schedule", ["message", "1F1B"])
def test_the_example_of_pipelines_learns_as_one_process(
    torchrun: Any, schedule: str
) -> None:
    arguments = ["--steps", "6", "--check", "--schedule", schedule]
    first, *others = torchrun(4, example, arguments=arguments, deadline_s=DEADLINE_S)
    status, said = first
    assert status == 0
    assert "6 steps on 4 ranks" in said
    assert "within the tolerance" in said
    assert others == [[0, ""]] * 3


def test_more_stages_than_layers_of_the_example_are_refused(torchrun: Any) -> None:
    """On all ranks, before any of them waits for another."""
    arguments = ["--schedule", "Interleaved1F1B"]
    first, *others = torchrun(8, example, arguments=arguments, deadline_s=DEADLINE_S)
    assert first[0] == 2
    assert "makes 16 stages of 8 ranks, and the model has 15 layers" in first[1]
    assert others == [[2, ""]] * 7


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--steps", "0"], "--steps 0: expected a number from 1"),
        (["--schedule", "best"], "--schedule best: Unknown schedule"),
    ],
)
def test_wrong_arguments_of_the_pipeline_are_refused(
    wrong: list[str], text: str
) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        pipeline.main(wrong)
    assert text in said.getvalue()
