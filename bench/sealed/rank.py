# SPDX-License-Identifier: Apache-2.0
"""One rank of a measurement: times all candidates of the job's cells, in turns.

``rank.py JOB``: a JSON file with the cells, and where rank 0 writes the times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import commrt
from commrt.comm import Communicator
from commrt.files.write import write_file
from commrt.vocabulary.operations import operation

_ROUNDS = 6
_LOST_AFTER, _LOST = 2, 1.6
"""Rounds after which a candidate is left out that never came within so many times the
best one's time."""


def main() -> None:
    """Measure each cell, and let rank 0 write all times."""
    job = json.loads(Path(sys.argv[1]).read_text())
    comm = commrt.init()
    found: dict[str, dict[str, list[float]]] = {}
    for number, cell in enumerate(job["cells"]):
        found[cell["key"]] = _measured(comm, number, cell)
        if comm.rank == 0:
            print(cell["key"], flush=True)
    if comm.rank == 0:
        write_file(Path(job["result"]), json.dumps(found))
    comm.barrier()


def _measured(
    comm: Communicator, number: int, cell: dict[str, Any]
) -> dict[str, list[float]]:
    """Return microseconds of the slowest rank, call by call, for each candidate."""
    calls = {
        one["name"]: _bound(comm, cell, one["algorithm"], one["params"])
        for one in cell["candidates"]
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    live = list(calls)
    for each in range(_ROUNDS + 1):
        order = np.random.default_rng((number, each)).permutation(len(live))
        for name in [live[at] for at in order]:
            us = _took_us(comm, calls[name])
            if each:  # the first one connects, and warms up
                times[name].append(us)
        if each == _LOST_AFTER:
            best = min(min(mine) for mine in times.values())
            live = [name for name in live if min(times[name]) <= _LOST * best]
    return times


def _bound(
    comm: Communicator, cell: dict[str, Any], algorithm: str, params: dict[str, Any]
) -> Callable[[], Any]:
    spec = operation(cell["op"])
    whole = cell["num_elements"]
    own = whole // comm.size if spec.out_count == "times_size" else whole
    x = np.ones(own, np.float32)
    given: dict[str, Any] = {"root": 0} if spec.has_root else {}
    plan = getattr(comm.plan, cell["op"])
    bound = plan(x, backend="tcp", algorithm=algorithm, params=params or None, **given)
    call: Callable[[], Any] = bound.__call__
    return call


def _took_us(comm: Communicator, call: Callable[[], Any]) -> float:
    comm.barrier()
    comm.barrier()
    start = time.perf_counter()
    call()
    slowest = np.array([time.perf_counter() - start])
    comm.allreduce(slowest, op="max")
    return float(slowest[0]) * 1e6


if __name__ == "__main__":
    main()
