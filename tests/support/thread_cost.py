# SPDX-License-Identifier: Apache-2.0
"""Processor time of threads beside a rank that computes, on ranks of a launcher.

    mpiexec -n 2 python tests/support/thread_cost.py

Rank 0 computes for 5 seconds, first with nothing in flight, then while a sum waits for
a rank that is late. It prints what its other threads took, in percent of a core.
"""

from __future__ import annotations

import time

import numpy as np

import commrt

COMPUTES_S, LATE_S = 5.0, 6.0


def compute(seconds: float) -> None:
    """Keep a core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def taken_by_others(seconds: float) -> float:
    """Return the percent of a core that all threads but this one take meanwhile."""
    others = time.process_time() - time.thread_time()
    start = time.perf_counter()
    compute(seconds)
    now = time.process_time() - time.thread_time()
    return 100 * (now - others) / (time.perf_counter() - start)


def main() -> None:
    """Print a line for each state."""
    comm = commrt.init()
    x = np.ones(1 << 20, np.float32)
    comm.allreduce(x)
    for waits in (False, True):
        comm.barrier()
        if comm.rank != 0:
            time.sleep(LATE_S)
            request = comm.allreduce(x, nonblocking=True) if waits else None
        else:
            request = comm.allreduce(x, nonblocking=True) if waits else None
            compute(0.2)
            percent = taken_by_others(COMPUTES_S)
            state = "a sum waits for a late rank" if waits else "nothing in flight"
            print(f"{state}: other threads took {percent:.2f} % of a core", flush=True)
        if request is not None:
            request.wait()


if __name__ == "__main__":
    main()
