# SPDX-License-Identifier: Apache-2.0
"""What dist.all_reduce takes more than the runtime's own call, by its parts.

    python tests/pytorch/adapter_cost.py
    python tests/pytorch/adapter_cost.py cpu:commrt,cuda:gloo

In one process, so without waiting; as calls follow one another, and as they do where
memory is copied between them, which empties the core's caches. The second is a backend
in a group of torch's, with torch 2.14 and later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

CALLS = 2500
COPIED = (0, 65536, 2097152)
"""Bytes that are copied between calls."""


def main() -> None:
    """Print the first quartile of each, in microseconds."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "commrt"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    comm = group._get_backend(torch.device("cpu")).communicator
    x = torch.ones(2)
    opts, tensors = dist.AllreduceOptions(), [x]
    opts.asyncOp = False
    parts: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "runtime": lambda: comm.allreduce(x),
        "method": lambda: group.allreduce(tensors, opts),
        "function": lambda: dist.all_reduce(x),
    }
    for nbytes in COPIED:
        took = quartiles(parts, nbytes)
        method = took["method"] - took["runtime"]
        function = took["function"] - took["method"]
        print(
            f"{nbytes:8d} B copied: runtime {took['runtime'] - took['nothing']:.2f}, "
            f"torch's function {function:.2f} more, the group's method {method:.2f}"
        )
    dist.destroy_process_group()


def quartiles(parts: dict[str, Callable[[], object]], nbytes: int) -> dict[str, float]:
    """Return what a call takes, each timed by itself, in turns."""
    source = np.ones(nbytes, np.uint8)
    target = np.empty_like(source)
    took: dict[str, list[int]] = {name: [] for name in parts}
    now = time.perf_counter_ns
    for _ in range(CALLS):
        for name, call in parts.items():
            target[:] = source
            begin = now()
            call()
            took[name].append(now() - begin)
    return {name: sorted(each)[CALLS // 4] / 1e3 for name, each in took.items()}


if __name__ == "__main__":
    main()
