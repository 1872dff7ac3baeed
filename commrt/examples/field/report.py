# SPDX-License-Identifier: Apache-2.0
"""The report of a rung: losses beside one process's, and what moved in an epoch."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

import commrt
from commrt.comm import Communicator
from commrt.errors import RevokedError, UsageError
from commrt.examples.endings import ending_together
from commrt.examples.field.rungs import RUNGS, scaled, serial
from commrt.examples.field.schedules import scaled_lr
from commrt.examples.field.tiles import Field
from commrt.examples.field.training import Settings, Trained, mean_square
from commrt.trace.recording import Recording

__all__ = ["CASES", "TOLERANCES", "Sent", "main", "sent_by"]

SCALING = "scaling"
AXIS = re.compile(r"\[(.+?)\]")
"""In the name of a communicator along an axis of a grid."""
CASES = (("none", 0), ("sqrt", 0), ("sqrt", 2), ("linear", 0), ("linear", 2))
"""Rules of the learning rate, and epochs of warm-up."""
TOLERANCES = {torch.float64: 1e-10, torch.bfloat16: 2e-2}
"""Largest difference of an epoch's loss from one process's; it begins near 1."""


class Sent(NamedTuple):
    """One line of a log: calls of an operation along an axis, of one element type."""

    axis: str
    op: str
    dtype: str
    calls: int
    nbytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Train by one rung on the ranks that a launcher started; return the status."""
    rung, settings, factor = _arguments(argv)
    torch.set_num_threads(1)  # ranks share the cores
    comm = commrt.init()
    try:
        with ending_together(comm):
            if rung == SCALING:
                lines, status = [*_compared(comm, settings, factor)], 0
            else:
                trained = RUNGS[rung](comm, settings)
                # The first rank repeats the training alone; the others are done.
                lines, status = _beside_one_process(comm, rung, settings, trained)
    except (UsageError, RevokedError) as error:
        # Such as a number of ranks that makes no grid; or another rank has said why.
        lines, status = [f"{rung} on {_ranks(comm)}: {error}"], 2
        if comm.rank:  # a launcher may end the first rank before it says so
            print(f"rank {comm.rank}: {error}", file=sys.stderr, flush=True)
    if comm.rank == 0:
        print("\n".join(lines), flush=True)
    return status


def sent_by(recording: Recording, rank: int) -> list[Sent]:
    """Return what a rank has sent, by axis and operation, in their order."""
    found = []
    for log in recording.logs():
        if log.rank == rank:
            for key, volume in log.volume(("dimension", "op", "dtype")).items():
                group, op, dtype = key
                axis = AXIS.search(group)
                of = "all ranks" if axis is None else axis[1]
                found.append(Sent(of, op, dtype, volume.calls, volume.nbytes))
    return sorted(found)


def _arguments(argv: Sequence[str] | None) -> tuple[str, Settings, int]:
    parser = argparse.ArgumentParser("python -m commrt.examples.field")
    parser.description = "Train a vision transformer that adds detail to a field."
    parser.add_argument("rung", choices=[*RUNGS, SCALING], help="how to train")
    usual = Settings()
    parser.add_argument("--epochs", type=int, default=usual.epochs, help="of all tiles")
    parser.add_argument(
        "--tiles", type=int, default=usual.num_tiles, help="to learn, at most"
    )
    parser.add_argument("--lr", type=float, default=usual.lr, help="learning rate")
    parser.add_argument(
        "--factor", type=int, default=4, help="scaling: large batch over small one"
    )
    given = parser.parse_args(argv)
    for name in ("epochs", "tiles", "factor"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: expected a number from 1")
    if not 0 < given.lr < math.inf:
        parser.error(f"--lr {given.lr}: expected a number above 0")
    settings = Settings(epochs=given.epochs, lr=given.lr, num_tiles=given.tiles)
    return given.rung, settings, given.factor


def _beside_one_process(
    comm: Communicator, rung: str, settings: Settings, trained: Trained
) -> tuple[list[str], int]:
    """Return the report and the exit status; on other ranks than the first, nothing."""
    if comm.rank:
        return [], 0
    alone = (
        trained if rung == "serial" else serial(replace(settings, order=trained.order))
    )
    field = settings.field()
    lines = [
        f"{rung} on {_ranks(comm)}: {len(field.learned.guess)} tiles, "
        f"{settings.epochs} epochs of {settings.steps()} steps",
        "epoch            loss     one process   off by",
    ]
    worst = 0.0
    for epoch, pair in enumerate(zip(trained.losses, alone.losses, strict=True)):
        off = abs(pair[0] - pair[1])
        worst = off if not off <= worst else worst  # a NaN stays
        lines.append(f"{epoch + 1:5}  {pair[0]:14.8f}  {pair[1]:14.8f}   {off:.0e}")
    lines += _log_lines(sent_by(trained.recording, comm.rank))
    if rung == "serial":
        lines += _judged(trained, field)
    tolerance = TOLERANCES[torch.bfloat16 if rung == "bfloat16" else torch.float64]
    if not worst <= tolerance:
        lines.append(f"off by {worst:.1e}: expected at most {tolerance:.0e}")
        return lines, 1
    return lines, 0


def _ranks(comm: Communicator) -> str:
    return "1 rank" if comm.size == 1 else f"{comm.size} ranks"


def _log_lines(sent: Sequence[Sent]) -> list[str]:
    if not sent:
        return ["log of the first epoch: nothing was sent"]
    return [
        "log of the first epoch, of rank 0:",
        *(
            f"  {each.op:15} {each.axis:9} {each.dtype:8} {each.calls:6,} calls "
            f"{each.nbytes:12,} bytes"
            for each in sent
        ),
    ]


def _judged(trained: Trained, field: Field) -> list[str]:
    """Return how well tiles are predicted that were not learned."""
    bicubic = float(field.tested.detail.square().mean())
    found = mean_square(trained.model, field.tested)
    metres = [field.metres * square**0.5 for square in (bicubic, found)]
    return [
        f"{len(field.tested.guess)} other tiles: bicubic interpolation is wrong by "
        f"{metres[0]:.2f} m (root mean square),",
        f"the model by {metres[1]:.2f} m; its mean square is {found / bicubic:.2f} of "
        f"bicubic's",
    ]


def _compared(comm: Communicator, settings: Settings, factor: int) -> Iterator[str]:
    """Train with small and with large batches, and yield the lines of a table."""
    field = settings.field()
    bicubic = float(field.tested.detail.square().mean())

    def line(batch: int, rule: str, warm: int, rate: float, trained: Trained) -> str:
        tested = mean_square(trained.model, field.tested) / bicubic
        return (
            f"{batch:5}  {rule:6} {rate:7.4f} {warm:8} {trained.losses[0]:11.4f} "
            f"{trained.losses[-1]:10.4f} {tested:12.4f}"
        )

    yield f"scaling on {_ranks(comm)}: {settings.epochs} epochs"
    yield "batch  rule      rate  warm-up  first loss  last loss  other tiles"
    small = RUNGS["data"](comm, settings)
    yield line(settings.batch, "-", 0, settings.lr, small)
    for rule, warm in CASES:
        rate = scaled_lr(settings.lr, factor, rule)
        large = scaled(comm, settings, factor, rule, warm)
        yield line(factor * settings.batch, rule, warm, rate, large)
