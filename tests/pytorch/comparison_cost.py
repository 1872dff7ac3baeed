# SPDX-License-Identifier: Apache-2.0
"""What one of gloo's collectives takes more in commrt than in a group of gloo.

    COMMRT_NODES=1,1 torchrun --nproc-per-node 2 tests/pytorch/comparison_cost.py

Before it, the ranks compare what they have called (``gloo/native``). Each call here is
timed by itself, from when the last rank starts it until the last one returns: all ranks
must share a clock, so run on one machine. Beside both: gloo's collective behind an
allreduce of two numbers that goes by messages, as the comparison does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from commrt.torch import Options

CALLS = 400


def main() -> None:
    """Print quartiles in microseconds, for each number of bytes in the arguments."""
    dist.init_process_group("commrt")
    gloo = dist.new_group(backend="gloo")
    native = dist.new_group(pg_options=Options(algorithm="gloo/native"))
    short = np.zeros(2, dtype=np.int64)
    by_messages = dist.group.WORLD.communicator
    for nbytes in [int(each) for each in sys.argv[1:]] or [1 << 20]:
        x = torch.zeros(nbytes // 4)

        def compared_and_gloo(x: torch.Tensor = x) -> None:
            by_messages.allreduce(short, op="max")
            dist.all_reduce(x, group=gloo)

        calls: dict[str, Callable[[], object]] = {
            "gloo": lambda x=x: dist.all_reduce(x, group=gloo),
            "gloo/native": lambda x=x: dist.all_reduce(x, group=native),
            "a short sum, then gloo": compared_and_gloo,
            "a short sum": lambda: by_messages.allreduce(short, op="max"),
        }
        for name, took_us in spans_us(calls, gloo).items():
            if dist.get_rank() == 0:
                quartiles = (took_us[CALLS * part // 4] for part in (1, 2, 3))
                shown = " ".join(f"{us:9.0f}" for us in quartiles)
                print(f"{nbytes:10d} B  {name:24s} {shown}")
    dist.destroy_process_group()


def spans_us(
    calls: dict[str, Callable[[], object]], gloo: dist.ProcessGroup
) -> dict[str, list[float]]:
    """Return, sorted, how long all ranks were in each call, calls in turns."""
    times = torch.zeros(len(calls), CALLS, 2, dtype=torch.float64)
    for turn in range(CALLS):
        for which, call in enumerate(calls.values()):
            dist.barrier(group=gloo)
            times[which, turn, 0] = time.monotonic() * 1e6
            call()
            times[which, turn, 1] = time.monotonic() * 1e6
    dist.all_reduce(times, dist.ReduceOp.MAX, group=gloo)
    took = (times[:, :, 1] - times[:, :, 0]).sort(dim=1).values
    return {name: took[which].tolist() for which, name in enumerate(calls)}


if __name__ == "__main__":
    main()
