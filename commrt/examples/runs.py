# SPDX-License-Identifier: Apache-2.0
"""Parts that the examples share: arguments, the job, the check of losses."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from commrt.examples.endings import ending_together
from commrt.launch.detect import detect

__all__ = ["arguments_of", "compare", "job", "mean_over_ranks", "report", "say"]

TOLERANCE = 1e-4
"""Largest relative difference of a loss from that of a single process. Sums over ranks
add the same numbers in another order, which float32 rounds differently."""


def arguments_of(
    name: str, doc: str | None, steps: int, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Return the arguments of the command line."""
    about = (doc or "").partition("\n")[0]
    parser = argparse.ArgumentParser(f"python -m commrt.examples.{name}", None, about)
    parser.add_argument("--backend", default="commrt", help="commrt, or gloo")
    parser.add_argument("--steps", type=int, default=steps, help="of the optimizer")
    parser.add_argument(
        "--check",
        action="store_true",
        help="train in one process, too, and compare the losses step by step",
    )
    found = parser.parse_args(argv)
    if found.steps < 1:
        parser.error(f"--steps {found.steps}: expected a number from 1")
    return found


@contextmanager
def job(backend: str) -> Iterator[None]:
    """Be one of the ranks that a launcher has started; without one, the only rank.

    Where the body raises on one rank, the calls of the others end, too.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    # mpiexec and srun set no RANK: ``init_process_group`` knows their ranks.
    if "RANK" not in os.environ and detect().kind == "single":
        os.environ.update({**alone, "MASTER_PORT": "0"})
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group(backend)
    try:
        with ending_together(getattr(dist.group.WORLD, "communicator", None)):
            yield
    finally:
        dist.destroy_process_group()


def say(text: str) -> None:
    """Print a line, on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def mean_over_ranks(
    losses: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return each step's loss over the batches of all ranks."""
    both = torch.stack([loss.detach() for loss in losses])
    dist.all_reduce(both, group=group)
    found: list[float] = (both / dist.get_world_size(group)).tolist()
    return found


def report(
    train: Callable[[], list[float]], alone: Callable[[], list[float]] | None
) -> int:
    """Train, print the losses, compare them; return the program's exit status.

    ``alone`` trains in one process, None: nothing is compared. Each rank does so by
    itself: what comes of it is the same on all.
    """
    start = time.perf_counter()
    losses = train()
    seconds = time.perf_counter() - start
    step_ms = seconds / len(losses) * 1e3
    say(
        f"{len(losses)} steps on {dist.get_world_size()} ranks, backend "
        f"{dist.get_backend()}: {seconds:.1f} s, {step_ms:.1f} ms a step"
    )
    say(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    if alone is None:
        return 0
    return compare(losses, alone())


def compare(losses: Sequence[float], expected: Sequence[float]) -> int:
    """Print how far losses are from those of one process; 1 if beyond the tolerance."""
    worst, step = 0.0, 0
    for index, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
        off = abs(ours - theirs) / max(abs(theirs), 1e-3)
        if not off <= worst and not math.isnan(worst):  # nothing is worse than a NaN
            worst, step = off, index
    good = worst <= TOLERANCE
    text = (
        f"against one process: off by at most {worst:.1e} of the loss, in step {step}, "
        f"{'within' if good else 'beyond'} the tolerance of {TOLERANCE:.0e}"
    )
    say(text)
    if not good and dist.get_rank() == 0:
        print(
            f"step {step}: {losses[step]} here, {expected[step]} in one process",
            file=sys.stderr,
        )
    return 0 if good else 1
