# SPDX-License-Identifier: Apache-2.0
"""Exposed communication: what a training step takes longer than without communication.

    torchrun --nproc-per-node 2 -m commrt.bench.exposed

A step of the example CNN under DDP and one of the example GPT under FSDP2, each on
three groups in one launch: commrt's, gloo's, and one that moves nothing, on which every
rank does the same work. The three take turns, block by block, so that they meet the
same machine, in an order that changes from round to round. A block's time is that of
the slowest rank. A round's exposed time is its difference to the block without
communication; figures are medians over rounds, in milliseconds for a step. The same is
said of the time that a process has run on any core, which other programs on the machine
change less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from commrt.bench.in_process_group import Rows, names_of, report

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["WORKLOADS", "exposed_ms", "main", "measure"]

WAYS = ("commrt", "gloo", "none")
_ROUNDS = 30
_STEPS = 5
"""Steps of a block. The first one is not timed, as the ranks have just met."""
Step = Callable[[], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks that torchrun started."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.exposed")
    parser.add_argument(
        "--workload",
        type=names_of(WORKLOADS),
        default=list(WORKLOADS),
        help="what to train",
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="turns of all ways")
    parser.add_argument("--steps", type=int, default=_STEPS, help="timed in a block")
    parser.add_argument("--out", help="write all times to this file")
    arguments = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)

    def measured_here() -> Rows:
        return measure(
            arguments.workload, rounds=arguments.rounds, steps=arguments.steps
        )

    report(measured_here, _text, arguments.out)
    return 0


def measure(
    wanted: Sequence[str], *, rounds: int = _ROUNDS, steps: int = _STEPS
) -> list[dict[str, Any]]:
    """Return milliseconds for a step of every block, by workload and way."""
    import torch.distributed as dist

    groups = _groups()
    rows = []
    for name in wanted:
        ways = {way: WORKLOADS[name](group) for way, group in groups.items()}
        for step in ways.values():
            step(), step()  # buckets are cut anew after the first
        times: dict[str, list[float]] = {way: [] for way in ways}
        busy: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds):
            order = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
            for way in order:
                dist.barrier()
                wall_ms, cpu_ms = _block_ms(ways[way], steps)
                times[way].append(wall_ms)
                busy[way].append(cpu_ms)
        row: dict[str, Any] = {"workload": name, "steps": steps}
        rows.append({**row, "ms": _slowest(times), "cpu_ms": _slowest(busy)})
    return rows


def exposed_ms(row: dict[str, Any], way: str, clock: str = "ms") -> float:
    """Return the median over rounds of what a way takes longer than without."""
    pairs = zip(row[clock][way], row[clock]["none"], strict=True)
    return float(median(with_ms - without_ms for with_ms, without_ms in pairs))


def _block_ms(step: Step, steps: int) -> tuple[float, float]:
    """Return milliseconds for a step, by the wall's clock and the process's."""
    step()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    return wall_s / steps * 1e3, cpu_s / steps * 1e3


def _slowest(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the times of the slowest rank."""
    import torch
    import torch.distributed as dist

    found = {}
    for way, mine in times.items():
        each = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(each, op=dist.ReduceOp.MAX)
        found[way] = [round(ms, 4) for ms in each.tolist()]
    return found


def _groups() -> dict[str, Any]:
    """Return a group of all ranks for each way."""
    import torch.distributed as dist

    from commrt.bench.no_communication import BACKEND, register

    register()
    return {
        "commrt": dist.group.WORLD,
        "gloo": dist.new_group(backend="gloo"),
        "none": dist.new_group(backend=BACKEND),
    }


def _cnn_ddp(group: dist.ProcessGroup) -> Step:
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from commrt.examples import cnn
    from commrt.examples.digits import load_tensors

    rank, size = dist.get_rank(), dist.get_world_size()
    images, digits = cnn.batch_of(load_tensors(), 0, rank, size)
    model = DistributedDataParallel(cnn.made(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), digits).backward()
        optimizer.step()

    return step


def _gpt_fsdp(group: dist.ProcessGroup) -> Step:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from commrt.examples import gpt
    from commrt.examples.documents import load_documents, windows
    from commrt.examples.gpt_fsdp import sharded

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = windows(load_documents(), gpt.BATCH, gpt.LENGTH, 0)[rank::size]
    model = sharded(gpt.made(), DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).backward()
        optimizer.step()

    return step


WORKLOADS: dict[str, Callable[[Any], Step]] = {
    "cnn-ddp": _cnn_ddp,
    "gpt-fsdp": _gpt_fsdp,
}
"""Each makes a model over a group, and returns a step of its training."""


def _text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'ms for a step':<20}{'none':>10}{'commrt':>10}{'gloo':>10}"
        f"{'exposed: commrt':>18}{'gloo':>10}{'ratio':>8}"
    ]
    for row in rows:
        for clock, label in (("ms", ""), ("cpu_ms", ", on cores")):
            typical = {way: median(times) for way, times in row[clock].items()}
            ours = exposed_ms(row, "commrt", clock)
            theirs = exposed_ms(row, "gloo", clock)
            ratio = ours / theirs if theirs else float("nan")
            text = f"{row['workload'] + label:<20}"
            ways = ("none", "commrt", "gloo")
            text += "".join(f"{typical[way]:>10.2f}" for way in ways)
            lines.append(f"{text}{ours:>18.3f}{theirs:>10.3f}{ratio:>8.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
