# SPDX-License-Identifier: Apache-2.0
"""A convolutional network learns on while ranks die and come again.

    python -m commrt.run -n 3 --restarts 1 -m commrt.examples.elastic_cnn --kill 20

The last rank is killed in step 20, before its update. The others undo the step that
they are in, and go on. The launcher starts another process for it, which joins them and
gets the state.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch.nn import functional

import commrt
from commrt import elastic
from commrt.comm import Communicator
from commrt.examples.cnn import accuracy, batch_of, made
from commrt.examples.digits import load_tensors

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that a launcher started; return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        "python -m commrt.examples.elastic_cnn", None, about
    )
    parser.add_argument("--steps", type=int, default=100, help="of the optimizer")
    parser.add_argument("--kill", type=int, default=-1, help="the last rank, in a step")
    said = parser.parse_args(argv)

    torch.set_num_threads(1)  # ranks share the cores
    comm = commrt.init()
    dies = comm.rank == comm.size - 1 and not comm.joined
    images, digits = load_tensors()
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    def step(comm: Communicator, number: int) -> None:
        x, wanted = batch_of((images, digits), number, comm.rank, comm.size)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), wanted)
        loss.backward()
        for parameter in model.parameters():
            comm.allreduce(parameter.grad, op="avg")
        if dies and number == said.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()

    def changed(comm: Communicator) -> None:
        if comm.rank == 0:
            sys.stdout.write(f"{comm.size} ranks train\n")
            sys.stdout.flush()

    state = elastic.State(model=model, optimizer=optimizer)
    comm = elastic.run(step, state, until=said.steps, on_change=changed)
    if comm.rank == 0:
        right = accuracy(model, images, digits)
        sys.stdout.write(f"{right:.1%} of all digits are told right\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
