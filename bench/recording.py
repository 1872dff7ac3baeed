# SPDX-License-Identifier: Apache-2.0
"""The cost of a log per operation: blocks of calls with and without it, in turns.

    python -m commrt.bench.recording
    torchrun --nproc-per-node 1 -m commrt.bench.recording --torch

Times are of the calling thread's processor, so that other programs on the machine
count less. One rank is enough, and says most: nothing waits for anybody.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import commrt
from commrt.trace.recorder import recorder

__all__ = ["extra_ns", "main"]


def extra_ns(
    call: Callable[[], Any], *, calls: int = 2000, blocks: int = 60
) -> tuple[float, float, float]:
    """Return what a call takes without a recording, and what one adds; ns.

    Medians, of pairs of blocks that follow one another; and the difference of the
    least of all blocks, which other programs on the machine have least to do with.
    """
    without, within, added = [], [], []
    _block(call, calls)
    for _ in range(blocks):
        plain = _block(call, calls)
        recorder().begin()
        _block(call, calls // 10)  # the first call of a kind is looked at in full
        within.append(_block(call, calls))
        recorder().end()
        without.append(plain)
        added.append(within[-1] - plain)
    least = min(within) - min(without)
    return statistics.median(without), statistics.median(added), least


def _block(call: Callable[[], Any], calls: int) -> float:
    begin = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - begin) / max(1, calls)


def _calls(of_torch: bool) -> dict[str, Callable[[], Any]]:
    if of_torch:
        import torch
        import torch.distributed as dist

        dist.init_process_group("commrt")
        y, z = torch.ones(2), torch.ones(2 * dist.get_world_size())
        return {
            "dist.all_reduce": lambda: dist.all_reduce(y),
            "dist.all_gather_single": lambda: dist.all_gather_single(z, y),
            "dist.all_reduce, async": lambda: dist.all_reduce(y, async_op=True).wait(),
        }
    comm = commrt.init()
    x, out = np.ones(2, np.float32), np.ones(2 * comm.size, np.float32)
    bound = comm.plan.allreduce(x)
    return {
        "allreduce(x)": lambda: comm.allreduce(x),
        "allgather(x, out=y)": lambda: comm.allgather(x, out=out),
        "allreduce(x, nonblocking)": lambda: comm.allreduce(x, nonblocking=True).wait(),
        "plan.allreduce(x), run": lambda: bound(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per kind of call."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.recording")
    parser.add_argument("--torch", action="store_true", help="torch's calls")
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks (60)")
    parser.add_argument("--calls", type=int, default=2000, help="in a block (2000)")
    args = parser.parse_args(argv)
    print(
        f"{'8 bytes, CPU time in ns':32} {'without':>8} {'a log adds':>11} {'least':>7}"
    )
    for name, call in _calls(args.torch).items():
        plain, added, least = extra_ns(call, calls=args.calls, blocks=args.blocks)
        print(f"{name:32} {plain:8.0f} {added:11.0f} {least:7.0f}")
    if args.torch:
        import torch.distributed as dist

        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
