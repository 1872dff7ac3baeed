# SPDX-License-Identifier: Apache-2.0
"""Times of sums and exchanges between two nodes, by whatever carries their messages.

Start it by a launcher on two hosts, or with COMMRT_NODES=1,1 on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import commrt

LENGTHS = {8: 400, 1 << 10: 400, 32 << 10: 400, 1 << 20: 12, 16 << 20: 12}
"""Bytes of a rank's array, and how often each call is timed."""


def typical_us(call: Callable[[], Any], times: int) -> float:
    """Return the median time of a call, after two that are not timed."""
    took = []
    for _ in range(times + 2):
        start = time.perf_counter()
        call()
        took.append((time.perf_counter() - start) * 1e6)
    return median(took[2:])


def main() -> None:
    """Print a line for each length."""
    comm = commrt.init()
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for nbytes, times in LENGTHS.items():
        x = np.ones(nbytes // 8)
        out = np.empty_like(x)

        def add(x: Any = x, out: Any = out) -> None:
            comm.allreduce(x, out=out)

        def exchange(x: Any = x, out: Any = out) -> None:
            comm.sendrecv(x, dest=after, out=out, source=before)

        took = typical_us(add, times), typical_us(exchange, times)
        if comm.rank == 0:
            said = f"{nbytes} B: allreduce {took[0]:.1f} us, sendrecv {took[1]:.1f} us"
            print(said, flush=True)


if __name__ == "__main__":
    main()
