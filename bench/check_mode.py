# SPDX-License-Identifier: Apache-2.0
"""The price of check mode per call: blocks of calls with and without it, in turns.

    python -m commrt.run -n 4 -m commrt.bench.check_mode

Each rank has two communicators, of which one compares its calls across ranks. Rank 0
prints the medians of pairs of blocks that follow one another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import commrt
from commrt.bench.machine import describe_machine
from commrt.files.write import write_file

__all__ = ["main", "measure"]


@contextmanager
def _check_mode() -> Iterator[None]:
    """Let communicators that are made meanwhile compare their calls."""
    before = os.environ.get("COMMRT_DEBUG")
    os.environ["COMMRT_DEBUG"] = "check"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COMMRT_DEBUG"]
        else:
            os.environ["COMMRT_DEBUG"] = before


def _block_us(call: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) / calls / 1000.0


def measure(
    plain: Callable[[], Any], checked: Callable[[], Any], *, calls: int, blocks: int
) -> dict[str, Any]:
    """Return µs per call without and with checks; collective.

    ``added_us`` is the median of the differences of pairs of blocks.
    """
    pairs = []
    for _ in range(blocks + 1):
        pairs.append((_block_us(plain, calls), _block_us(checked, calls)))
    del pairs[0]  # made the plans
    return {
        "plain_us": statistics.median(pair[0] for pair in pairs),
        "checked_us": statistics.median(pair[1] for pair in pairs),
        "added_us": statistics.median(pair[1] - pair[0] for pair in pairs),
        "least_us": [min(pair[i] for pair in pairs) for i in range(2)],
        "pairs_us": pairs,
    }


def _calls(comm: commrt.Communicator) -> dict[str, Callable[[], Any]]:
    """Return calls of 8 bytes a rank, and one whose length is new in each call."""
    size = comm.size
    x, full, out = np.ones(2, np.float32), np.ones(2 * size, np.float32), None
    out = np.empty_like(full)
    counts = (2,) * size
    long, at = np.ones(60_000, np.float32), iter(range(1, 10**9))

    def new_length() -> Any:
        return comm.allreduce(long[: 2 + next(at) % 50_000])

    return {
        "allreduce(x)": lambda: comm.allreduce(x),
        "allgather(x, out=y)": lambda: comm.allgather(x, out=out),
        "bcast(x, root=0)": lambda: comm.bcast(x, root=0),
        "alltoallv(x, out=y, ...)": lambda: comm.alltoallv(
            full, out=out, send_counts=counts, recv_counts=counts
        ),
        "barrier()": lambda: comm.barrier(),
        "allreduce(x) of a new length": new_length,
        "allreduce(x, name='w')": lambda: comm.allreduce(x, name="w"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per kind of call."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.check_mode")
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks (40)")
    parser.add_argument("--calls", type=int, default=500, help="in a block (500)")
    parser.add_argument("--out", help="write raw data (JSON) to this file")
    args = parser.parse_args(argv)
    comm = commrt.init()
    with _check_mode():
        checked = comm.dup()
    rows = {}
    if comm.rank == 0:
        print(f"{comm.size} ranks, µs a call            without   with  check adds")
    for (name, plain), other in zip(
        _calls(comm).items(), _calls(checked).values(), strict=True
    ):
        rows[name] = measure(plain, other, calls=args.calls, blocks=args.blocks)
        if comm.rank == 0:
            row = rows[name]
            numbers = row["plain_us"], row["checked_us"], row["added_us"]
            print(f"{name:30} {numbers[0]:8.2f} {numbers[1]:7.2f} {numbers[2]:10.2f}")
    if comm.rank == 0 and args.out:
        found = {"machine": describe_machine(), "ranks": comm.size, "calls": rows}
        write_file(args.out, json.dumps(found, indent=1) + "\n")
    checked.free()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
