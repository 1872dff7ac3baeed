# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers of torch go on when ranks are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from run_ranks import RunRanks
from torch import nn

import commrt
from commrt import elastic
from commrt.comm import Communicator
from commrt.errors import RecoveryError
from commrt.local import run

AFTER = 4
Undo = Literal["copy", "optimizer"]


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


class Net(nn.Module):  # type: ignore[misc]
    """With running means, noise, and parameters that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.layers[3].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number for each row."""
        found: torch.Tensor = self.layers(x)
        return found


class Job:
    """A training on one rank."""

    def __init__(self, undo: Undo) -> None:
        torch.manual_seed(7)
        self.model = Net()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.state = elastic.State(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            undo=undo,
        )

    def step(self, comm: Communicator, number: int, dies: str = "") -> None:
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(8 * comm.size, 5, generator=generator)[
            comm.rank :: comm.size
        ]
        self.optimizer.zero_grad()
        (self.model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
        if dies == "before the sums":
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in self.optimizer.param_groups[0]["params"]:
            comm.allreduce(parameter.grad, op="avg")
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                comm.allreduce(buffer, op="avg")
        if dies == "after the sums":
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()
        self.schedule.step()

    def bits(self) -> list[str]:
        states = [*self.model.state_dict().values()]
        states += [
            value for each in self.optimizer.state.values() for value in each.values()
        ]
        return [x.numpy().tobytes().hex() for x in states]


def trains(undo: Undo, how: str, folder: str) -> dict[str, Any]:
    """Rank 1 dies in step 5; the others save what they go on with."""
    torch.set_num_threads(1)
    comm = commrt.init(deterministic=True)
    first = comm.rank
    job = Job(undo)
    torch.manual_seed(first)  # each rank has its own noise
    bits: dict[int, list[str]] = {}
    begin = 0

    def step(comm: Communicator, number: int) -> None:
        nonlocal begin
        if comm.size == 2 and not begin:
            begin = number
            torch.save(
                {
                    **job.state.entries(),
                    "noise": torch.get_rng_state(),
                    "lr": job.optimizer.param_groups[0]["lr"],
                },
                Path(folder) / f"{comm.rank}.pt",
            )
        job.step(comm, number, how if first == 1 and number == 5 else "")
        bits[number] = job.bits()

    comm = elastic.run(step, job.state, until=12)
    return {
        "begin": begin,
        "bits": [bits[number] for number in range(begin, begin + AFTER)],
    }


def begins_from(folder: str, begin: int) -> list[list[str]]:
    torch.set_num_threads(1)
    comm = commrt.init(deterministic=True)
    job = Job("copy")
    kept = torch.load(Path(folder) / f"{comm.rank}.pt", weights_only=False)
    job.model.load_state_dict(kept["model"])
    job.optimizer.load_state_dict(kept["optimizer"])
    job.schedule.load_state_dict(kept["schedule"])
    torch.set_rng_state(kept["noise"])
    bits = []
    for number in range(begin, begin + AFTER):
        job.step(comm, number)
        bits.append(job.bits())
    return bits


@pytest.mark.parametrize("undo", ["copy", "optimizer"])
@pytest.mark.parametrize("how", ["before the sums", "after the sums"])
def test_a_fresh_world_gets_the_same_bits(
    ranks: RunRanks, tmp_path: Path, undo: Undo, how: str
) -> None:
    folder = str(tmp_path)
    found = ranks.survivors(3, trains, undo=undo, how=how, folder=folder)
    assert [*found] == [0, 2]
    begins = {said["begin"] for said in found.values()}
    assert begins <= {5, 6}
    fresh = ranks(2, begins_from, folder=folder, begin=begins.pop())
    assert [found[0]["bits"], found[2]["bits"]] == fresh


def test_an_update_that_has_begun_cannot_be_undone() -> None:
    job = Job("optimizer")
    job.state.remember(0)
    job.state.undo(0)
    assert job.state.steps(0) == (0,)
    job.state.remember(0)
    job.optimizer.zero_grad()
    job.model(torch.ones(4, 5)).mean().backward()
    before = job.model.layers[1].running_mean.clone()
    job.optimizer.step()
    assert job.state.steps(1) == (1,)
    job.state.undo(0)
    assert job.state.steps(0) == ()
    job.state.load(Job("optimizer").state.entries())
    assert job.state.steps(0) == (0,)
    assert not torch.equal(job.model.layers[1].running_mean, before)


def test_with_optimizers_of_torch_nobody_returns_to_before_an_update() -> None:
    """A collective after the update fails on all ranks: none has the step's begin."""

    def main(comm: Communicator) -> str:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(comm: Communicator, number: int) -> None:
            weight.grad = torch.ones(3)
            optimizer.step()
            if number == 2:
                comm.revoke("a try")
            comm.allreduce(np.ones(1))

        state = elastic.State(undo="optimizer", weight=weight.data, optimizer=optimizer)
        with pytest.raises(RecoveryError) as caught:
            elastic.run(step, state, until=6, comm=comm)
        return str(caught.value)

    for said in run(2, main):
        assert "no step's state is whole" in said
        assert "undo='copy'" in said
