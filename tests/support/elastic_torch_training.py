# SPDX-License-Identifier: Apache-2.0
"""Trainings of torch that go on after a fault, each parallel in another way.

``ddp``: every rank has the model. ``hsdp``: two ranks have it together, sharded by
FSDP2, and replicas are averaged by FSDP2, too. ``tensor``: two ranks have it together
by tensor parallelism, and this program averages the replicas.
"""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import commrt.torch
from commrt import elastic
from commrt.comm import Communicator

__all__ = ["KINDS", "Kind", "TorchTraining", "Undo"]

Kind = Literal["ddp", "hsdp", "tensor"]
KINDS: tuple[Kind, ...] = ("ddp", "hsdp", "tensor")
Undo = Literal["copy", "optimizer"]
_AXES = ("replicate", "shard")
_WIDTH = 5  # shards are uneven, and one of the last layer is empty


class TorchTraining:
    """A small network, on one rank."""

    def __init__(self, kind: Kind, undo: Undo = "copy") -> None:
        self.kind, self.undo = kind, undo
        self.replica_size = 1 if kind == "ddp" else 2
        self.dies: tuple[int, str] = (-1, "")
        """In which step this rank kills itself, and where."""

    def build(self, comm: Communicator) -> elastic.State:
        """Make network and optimizer for the ranks of a communicator."""
        commrt.torch.init_process_group(comm)
        with torch.random.fork_rng(devices=[]):  # this rank's noise stays its own
            torch.manual_seed(7)
            net = nn.Sequential(
                *(nn.Linear(_WIDTH, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh()),
                nn.Linear(3, 1),
            )
        net[-1].bias.requires_grad_(False)  # optimizers may leave some alone
        if self.kind == "ddp":
            net.insert(1, nn.BatchNorm1d(6))
            net.insert(2, nn.Dropout(0.2))
            self.model: nn.Module = DistributedDataParallel(net)
        else:
            shape = (comm.size // 2, 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=_AXES)
            if self.kind == "hsdp":
                for layer in net:
                    if isinstance(layer, nn.Linear):
                        fully_shard(layer, mesh=mesh)
                self.model = fully_shard(net, mesh=mesh)
            else:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                self.model = parallelize_module(net, mesh["shard"], plan)
                self.replicas = mesh["replicate"].get_group()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.999)
        self.counter = torch.zeros((), dtype=torch.int64)
        self.state = elastic.State(
            counter=self.counter,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            undo=self.undo,
        )
        return self.state

    def step(self, comm: Communicator, number: int) -> None:
        """Take a step of the optimizer, which must follow the last one."""
        assert int(self.counter) == number, (int(self.counter), number)
        self.counter += 1
        rows = self._rows(comm, number)
        self.optimizer.zero_grad()
        loss = (self.model(rows) - rows.sum(1, keepdim=True)).square().mean()
        self._die(number, "in the middle")
        loss.backward()
        if self.kind == "tensor":
            for parameter in self.optimizer.param_groups[0]["params"]:
                gradient = _local(parameter.grad)
                dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self.replicas)
        self._die(number, "after the sums")
        self.optimizer.step()
        self.schedule.step()

    def bits(self) -> str:
        """Return all bits of this rank's part of model and optimizer."""
        states = [*self.model.state_dict().values()]
        for each in self.optimizer.state.values():
            states += each.values()
        return "".join(_local(x).detach().numpy().tobytes().hex() for x in states)

    def dump(self, file: Path) -> None:
        """Write all that a step changes."""
        noise = torch.get_rng_state()
        file.write_bytes(pickle.dumps([self.state.entries(), noise]))

    def load(self, file: Path) -> None:
        """Return to that state."""
        entries, noise = pickle.loads(file.read_bytes())
        self.state.load(entries)
        torch.set_rng_state(noise)

    def _rows(self, comm: Communicator, number: int) -> torch.Tensor:
        """Return this rank's rows; ranks of one tensor-parallel replica have the same.

        Each rank draws a part itself, from its own noise.
        """
        shares = 2 if self.kind == "tensor" else 1
        parts, mine = comm.size // shares, comm.rank // shares
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(8 * parts, _WIDTH, generator=generator)[mine::parts]
        return rows if self.kind == "tensor" else rows + 0.01 * torch.randn(rows.shape)

    def _die(self, number: int, where: str) -> None:
        if self.dies == (number, where):
            os.kill(os.getpid(), signal.SIGKILL)


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found
