# SPDX-License-Identifier: Apache-2.0
"""Digits that are sorted by class are learned with more or less shuffling over ranks.

    python -m commrt.run -n 4 -m commrt.examples.shuffled_digits --check

Each rank starts with images of a few digits alone. Before each epoch a fraction of all
images changes ranks: none, a part, or all, which is global shuffling. The network
normalises batches (``BatchNorm1d``), by the mean of each rank's own images, as under
torch's DDP. The statistics that it is tested with are averaged over ranks. mpiexec,
torchrun and plain Python start the program, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import commrt
from commrt.comm import Communicator
from commrt.examples.digits import load_digits
from commrt.examples.endings import ending_together
from commrt.layers.samples import BatchLoader, PartialShuffle

__all__ = ["main"]

Tensor: TypeAlias = torch.Tensor

HIDDEN = 64
BATCH = 16
"""Images of a batch of each rank."""
TESTED_IN = 5
"""One image of so many is not learned, but tested."""


class Digits(NamedTuple):
    """Images of digits, in float32, and what they show."""

    pixels: Tensor
    labels: Tensor


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that a launcher has started; return the exit status."""
    arguments = _arguments(argv)
    torch.set_num_threads(1)  # ranks share the cores
    comm = commrt.init()
    with ending_together(comm):
        return _run(comm, arguments)


def _run(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Train with each fraction on the ranks of a communicator; return the status."""
    learned, tested = _sorted_digits()
    if comm.rank == 0:
        print(
            f"{len(learned.labels)} images sorted by digit on {comm.size} ranks, "
            f"{arguments.epochs} epochs, {arguments.seeds} seeds"
        )
    status = 0
    for fraction in arguments.fractions:
        found, start = [], time.perf_counter()
        for seed in range(arguments.seeds):
            accuracy, is_whole = _trained(
                comm, learned, tested, fraction, seed, arguments
            )
            found.append(accuracy)
            status |= not is_whole
        seconds = (time.perf_counter() - start) / arguments.seeds
        if comm.rank == 0:
            print(
                f"fraction {fraction:<4g} accuracy {np.mean(found):.3f} "
                f"({np.min(found):.3f} to {np.max(found):.3f}), {seconds:.1f} s a run",
                flush=True,
            )
    if arguments.check and comm.rank == 0:
        print(f"each image on one rank in each epoch: {'no' if status else 'yes'}")
    return status


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    name = "python -m commrt.examples.shuffled_digits"
    parser = argparse.ArgumentParser(name, None, about)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each fraction")
    parser.add_argument(
        "--fractions",
        type=lambda text: [float(each) for each in text.split(",")],
        default=[0.0, 0.1, 0.3, 1.0],
        help="of the images, drawn for the exchange before each epoch",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="count the images of all ranks in each epoch: each must be there once",
    )
    found = parser.parse_args(argv)
    if found.seeds < 1 or found.epochs < 1:
        parser.error("--seeds and --epochs: expected numbers from 1 on")
    return found


def _sorted_digits() -> tuple[Digits, Digits]:
    """Return images to learn, in the order of the digits, and others to test."""
    images, labels = load_digits()
    pixels = torch.from_numpy(images.reshape(len(images), -1) / 16.0).float()
    truth = torch.from_numpy(labels.astype(np.int64))
    is_tested = torch.arange(len(truth)) % TESTED_IN == 0
    order = truth[~is_tested].argsort(stable=True)
    learned = Digits(pixels[~is_tested][order], truth[~is_tested][order])
    return learned, Digits(pixels[is_tested], truth[is_tested])


def _trained(
    comm: Communicator,
    learned: Digits,
    tested: Digits,
    fraction: float,
    seed: int,
    arguments: argparse.Namespace,
) -> tuple[float, bool]:
    """Return the accuracy, and whether each image was on one rank; collective."""
    torch.manual_seed(seed)  # the same first parameters on all ranks
    network = nn.Sequential(
        nn.Linear(64, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    numbers = np.arange(len(learned.labels))
    own = np.array_split(numbers, comm.size)[comm.rank]
    samples = {
        "pixels": learned.pixels[own],
        "label": learned.labels[own],
        "number": own,
    }
    is_whole = True
    with PartialShuffle(samples, comm, fraction, seed) as shuffle:
        loader = BatchLoader(shuffle, BATCH, num_epochs=arguments.epochs)
        for _ in range(arguments.epochs):
            seen = []
            for batch in loader:
                optimizer.zero_grad()
                logits = network(batch.samples["pixels"])
                labels = batch.samples["label"]
                loss = functional.cross_entropy(logits, labels, reduction="sum")
                (loss / batch.total).backward()
                _add_up(comm, [each.grad for each in network.parameters()])
                optimizer.step()
                seen += batch.samples["number"].tolist()
            if arguments.check:
                every = comm.allgather_object(seen)
                everyone = [number for own in every for number in own]
                is_whole &= sorted(everyone) == numbers.tolist()
    _average_statistics(comm, network)
    network.eval()
    with torch.no_grad():
        found = network(tested.pixels).argmax(1)
    return float((found == tested.labels).float().mean()), is_whole


def _add_up(comm: Communicator, gradients: Sequence[Any]) -> None:
    """Sum gradients over all ranks, in place; collective."""
    flat = torch.cat([each.view(-1) for each in gradients])
    comm.allreduce(flat)
    parts = flat.split([each.numel() for each in gradients])
    for each, part in zip(gradients, parts, strict=True):
        each.copy_(part.view_as(each))


def _average_statistics(comm: Communicator, network: nn.Module) -> None:
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            comm.allreduce(buffer, "avg")


if __name__ == "__main__":
    sys.exit(main())
