# SPDX-License-Identifier: Apache-2.0
"""The price of ``deterministic=True``: one communicator with it, one without, in turns.

    mpiexec -n 4 python -m commrt.bench.determinism_cost --op allreduce

Both take turns in one launch, so that the machine is in one state for both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from commrt.bench.options import check_dtype
from commrt.bench.timing_loop import numpy_dtype
from commrt.errors import UsageError

__all__ = ["main", "measure"]

_TURN_S = 0.004
"""What one turn of one communicator takes, about."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks that mpiexec started."""
    arguments = _parser().parse_args(argv)
    try:
        check_dtype(arguments.dtype)
        sizes = [int(part) for part in arguments.sizes.split(",")]
    except (UsageError, ValueError) as error:
        print(f"determinism_cost: {error}", file=sys.stderr)
        return 2
    import commrt

    comm = commrt.init()
    rows = [
        measure(comm, arguments.op, arguments.dtype, nbytes, arguments.turns)
        for nbytes in sizes
    ]
    if comm.rank == 0:
        link = comm.facts.link_class
        print(f"{arguments.op}, {arguments.dtype}, {comm.size} ranks, {link} links\n")
        print("| bytes | any order, us | from the left, us | ratio | any | left |")
        print("|---:|---:|---:|---:|---|---|")
        for row in rows:
            print("| " + " | ".join(row) + " |")
    return 0


def measure(comm: Any, coll: str, dtype: str, nbytes: int, turns: int) -> list[str]:
    """Return one row of the table; on every rank, but only rank 0's counts."""
    kind = numpy_dtype(dtype)
    blocks = max(1, nbytes // kind.itemsize // comm.size)
    whole = coll == "reduce_scatter" or nbytes < kind.itemsize
    x = np.ones(blocks * comm.size if whole else nbytes // kind.itemsize, kind)
    with comm.dup(deterministic=False) as free, comm.dup(deterministic=True) as left:
        pair = [_bound(each, coll, x) for each in (free, left)]
        count = _calls(comm, pair[0])
        times: list[list[float]] = [[], []]
        for turn in range(turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                comm.barrier()
                start = time.perf_counter()
                for _ in range(count):
                    pair[which]()
                times[which].append((time.perf_counter() - start) / count * 1e6)
        us = [statistics.median(each) for each in times]
        ratio = statistics.median(
            b / a for a, b in zip(times[0], times[1], strict=True)
        )
        names = [
            str(each.explain(coll, nbytes, dtype=dtype).choice.candidate)
            for each in (free, left)
        ]
    return [str(nbytes), f"{us[0]:.2f}", f"{us[1]:.2f}", f"{ratio:.2f}", *names]


def _bound(comm: Any, coll: str, x: Any) -> Any:
    """Return a call, run once: it is planned then."""
    shape = x.size // comm.size if coll == "reduce_scatter" else x.size
    call = getattr(comm.plan, coll)(x, out=np.empty(shape, x.dtype))
    for _ in range(3):
        call()
    return call


def _calls(comm: Any, call: Any) -> int:
    """Return how many calls make a turn; the same on every rank."""
    start = time.perf_counter()
    for _ in range(3):
        call()
    mine = max(1, round(_TURN_S / ((time.perf_counter() - start) / 3)))
    agreed = comm.allreduce(np.array([mine]), op="min")
    return int(agreed[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt.bench.determinism_cost", description=__doc__
    )
    parser.add_argument("--op", default="allreduce", help="operation (allreduce)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument(
        "--sizes",
        default="8,512,4096,32768,262144,1048576,8388608,33554432",
        help="bytes, comma separated",
    )
    parser.add_argument("--turns", type=int, default=60, help="of each (60)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
