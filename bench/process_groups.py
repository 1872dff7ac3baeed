# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on commrt beside gloo, and beside commrt's own calls.

    torchrun --nproc-per-node 2 -m commrt.bench.process_groups
    torchrun --nproc-per-node 2 -m commrt.bench.process_groups --alone
    COMMRT_NODES=1,1 torchrun --nproc-per-node 2 -m commrt.bench.process_groups

Both backends' groups are in one launch and take turns, block by block, so that they
meet the same machine. ``--alone`` has no gloo, whose threads take turns with the ranks
where there are no cores to spare, and shows what the adapter adds to commrt's call on
an array of numpy. Times are medians over blocks, in microseconds, of rank 0. A message
(``send_recv``) goes from the first rank to the last one and back, and half of that is
its time. ``COMMRT_NODES`` pretends nodes, whose messages take the way between nodes.
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from commrt.bench.in_process_group import names_of, report

if TYPE_CHECKING:
    import torch.distributed as dist

    from commrt.comm import Communicator

__all__ = ["main", "measure"]

SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 64 << 20)
"""Bytes of a rank's tensor."""
USUAL = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "send_recv")
OPERATIONS = (*USUAL, "broadcast", "reduce", "gather", "scatter", "barrier")
_BLOCKS = 15
_BLOCK_NBYTES = 32 << 20
"""A block's calls move about so much, but are at least two and at most 300."""
Call = Callable[[], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks that torchrun started."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.process_groups")
    parser.add_argument(
        "--op",
        type=names_of(OPERATIONS),
        default=list(USUAL),
        help=f"operations, with commas between them (default: {','.join(USUAL)})",
    )
    parser.add_argument(
        "--bytes",
        type=_sizes,
        default=list(SIZES),
        help="bytes of a rank's tensor, with commas between them; 4 at least",
    )
    parser.add_argument("--alone", action="store_true", help="without gloo")
    parser.add_argument("--out", help="write all times to this file")
    arguments = parser.parse_args(argv)
    wanted, alone, sizes = arguments.op, arguments.alone, arguments.bytes
    report(lambda: measure(wanted, alone=alone, sizes=sizes), _text, arguments.out)
    return 0


def _sizes(text: str) -> list[int]:
    sizes = [int(word) for word in text.split(",")]
    if min(sizes) < 4:
        raise ArgumentTypeError(f"{text}: a tensor has 4 bytes at least")
    return sizes


def measure(
    wanted: Sequence[str],
    *,
    alone: bool,
    sizes: Sequence[int] = SIZES,
    blocks: int = _BLOCKS,
) -> list[dict[str, Any]]:
    """Return the times of blocks, in µs for a call, by operation, bytes and way."""
    import torch.distributed as dist

    ours: Any = dist.group.WORLD
    gloo = None if alone else dist.new_group(backend="gloo")
    rows = []
    for name in wanted:
        for nbytes in sizes:
            calls = {"commrt": _call(name, nbytes, ours)}
            if gloo is not None:
                calls["gloo"] = _call(name, nbytes, gloo)
            elif name == "all_reduce":
                calls["without torch"] = _own_call(nbytes, ours.communicator)
            repetitions = max(2, min(300, _BLOCK_NBYTES // nbytes))
            times: dict[str, list[float]] = {way: [] for way in calls}
            for _ in range(blocks):
                for way, call in calls.items():
                    dist.barrier()
                    us = _block_us(call, repetitions)
                    # There and back again are two messages.
                    times[way].append(round(us / 2 if name == "send_recv" else us, 3))
            rows.append({"op": name, "nbytes": nbytes, "us": times})
    return rows


def _block_us(call: Call, repetitions: int) -> float:
    call()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - start) / repetitions * 1e6


def _call(name: str, nbytes: int, group: dist.ProcessGroup) -> Call:
    """Return a call on tensors of its own."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    count = max(size, nbytes // 4)
    x = torch.zeros(count)
    if name == "all_reduce":
        return lambda: dist.all_reduce(x, group=group)
    if name == "all_to_all":
        out = torch.zeros(count)
        return lambda: dist.all_to_all_single(out, x, group=group)
    if name == "all_gather":
        gathered = torch.zeros(size * count)
        return lambda: dist.all_gather_into_tensor(gathered, x, group=group)
    if name == "send_recv":
        return _ping_pong(torch.zeros(nbytes // 4), group)
    if name in _OTHERS:
        return _OTHERS[name](x, group)
    part = torch.zeros(count // size)
    return lambda: dist.reduce_scatter_tensor(part, x, group=group)


def _broadcast(x: Any, group: dist.ProcessGroup) -> Call:
    import torch.distributed as dist

    return lambda: dist.broadcast(x, 0, group=group)


def _reduce(x: Any, group: dist.ProcessGroup) -> Call:
    import torch.distributed as dist

    return lambda: dist.reduce(x, 0, group=group)


def _gather(x: Any, group: dist.ProcessGroup) -> Call:
    import torch.distributed as dist

    parts = _parts(x)
    return lambda: dist.gather(x, parts, dst=0, group=group)


def _scatter(x: Any, group: dist.ProcessGroup) -> Call:
    import torch.distributed as dist

    parts = _parts(x)
    return lambda: dist.scatter(x, parts, src=0, group=group)


def _parts(x: Any) -> list[Any] | None:
    """Return a tensor like ``x`` for each rank, on the first rank alone."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    return [torch.zeros_like(x) for _ in range(size)] if dist.get_rank() == 0 else None


def _barrier(_: Any, group: dist.ProcessGroup) -> Call:
    import torch.distributed as dist

    return lambda: dist.barrier(group=group)


_OTHERS: dict[str, Callable[[Any, Any], Call]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}


def _ping_pong(x: Any, group: dist.ProcessGroup) -> Call:
    """Return a message from the first rank to the last one and back."""
    import torch.distributed as dist

    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def first() -> None:
        dist.send(x, last, group=group)
        dist.recv(x, last, group=group)

    def other() -> None:
        dist.recv(x, 0, group=group)
        dist.send(x, 0, group=group)

    if rank == 0:
        return first
    return other if rank == last else lambda: None


def _own_call(nbytes: int, comm: Communicator) -> Call:
    import numpy as np

    x = np.zeros(nbytes // 4, np.float32)
    return lambda: comm.allreduce(x)


def _text(rows: Sequence[dict[str, Any]]) -> str:
    ways = list(dict.fromkeys(way for row in rows for way in row["us"]))
    lines = [f"{'operation':<16}{'bytes':>10}" + "".join(f"{w:>15}" for w in ways)]
    lines[0] += f"{'ratio':>8}"
    for row in rows:
        typical = {way: median(times) for way, times in row["us"].items()}
        text = f"{row['op']:<16}{row['nbytes']:>10}"
        text += "".join(f"{typical.get(way, float('nan')):>15.2f}" for way in ways)
        others = [us for way, us in typical.items() if way != "commrt"]
        text += f"{typical['commrt'] / others[0]:>8.2f}" if others else ""
        lines.append(text)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
