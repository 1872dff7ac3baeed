# SPDX-License-Identifier: Apache-2.0
"""A small GPT learns on while ranks die, whichever way it is parallel.

    python -m commrt.run -n 6 --restarts 2 -m commrt.examples.elastic_gpt \\
        --parallel hsdp --kill 10

``ddp``: each rank has the model. ``hsdp``: pairs of ranks have it together, sharded by
FSDP2. ``tensor``: pairs have it together, each layer cut in two. Pairs average their
gradients. The last rank is killed in a step: what is left of its pair ends, too, and
both come again and join the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import commrt
import commrt.torch
from commrt import elastic
from commrt.comm import Communicator
from commrt.errors import RecoveryError
from commrt.examples import gpt
from commrt.examples.documents import load_documents, windows
from commrt.examples.gpt_fsdp import sharded
from commrt.examples.gpt_tensor_parallel import TENSOR, cut

__all__ = ["main"]


class Training:
    """A model, its optimizer, and a step of both, on the ranks that live."""

    def __init__(self, parallel: str, text: bytes) -> None:
        self.parallel, self.text = parallel, text
        self.replica_size = 1 if parallel == "ddp" else TENSOR
        self.losses: list[float] = []

    def build(self, comm: Communicator) -> elastic.State:
        """Make the model on groups of these ranks; called again after each change."""
        commrt.torch.init_process_group(comm)
        model: nn.Module = gpt.made()
        if self.parallel == "ddp":
            model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh(
                "cpu",
                (comm.size // TENSOR, TENSOR),
                mesh_dim_names=("replicate", "part"),
            )
            model = (
                sharded(model, mesh)
                if self.parallel == "hsdp"
                else cut(model, mesh["part"])
            )
            self.replicas = mesh["replicate"].get_group()
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return elastic.State(model=model, optimizer=self.optimizer)

    def step(self, comm: Communicator, number: int) -> None:
        """Train on this rank's part of a batch."""
        # Ranks that cut layers see the same windows, those that shard see others.
        same = TENSOR if self.parallel == "tensor" else 1
        part, parts = comm.rank // same, comm.size // same
        rows = windows(self.text, gpt.BATCH, gpt.LENGTH, number)[part::parts]
        self.optimizer.zero_grad()
        loss = self.model(rows)
        loss.backward()
        if self.parallel == "tensor":
            for parameter in self.model.parameters():
                average(parameter.grad, self.replicas)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))


def average(gradient: torch.Tensor | None, replicas: dist.ProcessGroup) -> None:
    """Average this rank's piece of a gradient over the replicas."""
    assert gradient is not None
    piece = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    dist.all_reduce(piece, dist.ReduceOp.AVG, group=replicas)


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that a launcher started; return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        "python -m commrt.examples.elastic_gpt", None, about
    )
    kinds = ["ddp", "hsdp", "tensor"]
    parser.add_argument("--parallel", choices=kinds, default="ddp")
    parser.add_argument("--steps", type=int, default=40, help="of the optimizer")
    parser.add_argument("--kill", type=int, default=-1, help="the last rank, in a step")
    said = parser.parse_args(argv)

    torch.set_num_threads(1)  # ranks share the cores
    comm = commrt.init()
    dies = comm.rank == comm.size - 1 and not comm.joined
    training = Training(said.parallel, load_documents())

    def step(comm: Communicator, number: int) -> None:
        if dies and number == said.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        training.step(comm, number)

    def changed(comm: Communicator) -> None:
        if comm.rank == 0:
            sys.stdout.write(f"{comm.size} ranks train\n")
            sys.stdout.flush()

    try:
        comm = elastic.run(
            *(step, training.build),
            until=said.steps,
            on_change=changed,
            replica_size=training.replica_size,
        )
    except RecoveryError as error:
        # The other one of its pair has died. The launcher starts a process anew.
        sys.stderr.write(f"this rank ends, and may come again: {error}\n")
        return 1
    if comm.rank == 0:
        first, last = training.losses[0], training.losses[-1]
        sys.stdout.write(f"the loss went from {first:.3f} to {last:.3f}\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
