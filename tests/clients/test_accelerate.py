# SPDX-License-Identifier: Apache-2.0
"""accelerate on commrt: training, accumulated gradients, gathered metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from client_programs import DEADLINE_S, Program
from client_training import ROWS, STEPS, alone, batch, loss_of, net, optimizer_of
from torch.utils.data import DataLoader, TensorDataset

PROGRAM = Program("accelerate", "accelerate")
pytestmark = PROGRAM.marks


def accelerator(**options: Any) -> Any:
    """Return one whose group is commrt's: it names a backend for GPUs only."""
    from accelerate import Accelerator

    dist.init_process_group("commrt")
    made = Accelerator(cpu=True, **options)
    assert made.num_processes == dist.get_world_size()
    assert dist.get_backend() == "commrt"
    return made


def loader(rows: int) -> Any:
    """Return batches of so many rows of the whole training, in order."""
    xs, ys = zip(*(batch(step) for step in range(STEPS)), strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=rows)


def training(accumulated: int) -> list[float]:
    runner = accelerator(gradient_accumulation_steps=accumulated)
    rows = ROWS // runner.num_processes // accumulated
    model = net()
    model, optimizer, batches = runner.prepare(
        model, optimizer_of(model.parameters()), loader(rows)
    )
    found: list[float] = []
    for x, y in batches:
        with runner.accumulate(model):
            loss = loss_of(model(x), y)
            runner.backward(loss)
            runner.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
        every = runner.gather(loss.detach())
        torch.testing.assert_close(every.mean(), runner.reduce(loss.detach(), "mean"))
        found.append(every.mean().item())
    runner.end_training()
    pieces = [found[at : at + accumulated] for at in range(0, len(found), accumulated)]
    return [sum(piece) / accumulated for piece in pieces]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_training(torchrun: Any, compare: Any, accumulated: int, size: int) -> None:
    got = torchrun(size, training, deadline_s=DEADLINE_S, accumulated=accumulated)
    assert all(each == got[0] for each in got)
    how = f"DDP, gradients of {accumulated} batches"
    compare(f"{PROGRAM}, {how}", alone(), got)


def metrics() -> list[Any]:
    """Gather what does not divide evenly, objects, and rows of any number."""
    from accelerate import utils

    runner = accelerator()
    rank, size = runner.process_index, runner.num_processes
    numbers = DataLoader(TensorDataset(torch.arange(11)), batch_size=2)
    batches = runner.prepare(numbers)
    seen = [runner.gather_for_metrics(x).tolist() for (x,) in batches]
    ragged = torch.full((rank + 1, 2), float(rank))
    padded = runner.gather(runner.pad_across_processes(ragged, dim=0, pad_index=-1))
    listed = utils.broadcast_object_list([rank, {"from": rank}], from_process=1)
    objects = utils.gather_object([{"rank": rank}])
    with runner.split_between_processes(list(range(7))) as mine:
        shares = utils.gather_object(mine)
    runner.wait_for_everyone()
    return [
        sorted(x for one in seen for x in one) == [*range(11)],
        padded.shape == (size * size, 2),
        listed == [1, {"from": 1}],
        [each["rank"] for each in objects] == [*range(size)],
        shares == [*range(7)],
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_metrics_and_objects(torchrun: Any, size: int) -> None:
    assert torchrun(size, metrics, deadline_s=DEADLINE_S) == [[True] * 5] * size
