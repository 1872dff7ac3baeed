# SPDX-License-Identifier: Apache-2.0
"""One launch of the fusion benchmark: ``mpiexec -n N python fused_worker.py JOB``.

The ways take turns, so that all of them meet the same machine. All sum zeros in place,
so values stay as they are. The short arrays lie where they happen to lie. On a device
``wait()`` blocks nobody: a way is over when its stream is empty.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if __name__ == "__main__":
    # This folder must not shadow anything that the libraries import.
    del sys.path[0]

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["measure"]

Call = Callable[[], Any]


def measure(comm: Communicator, job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure on a communicator; only rank 0's result counts."""
    import commrt
    from commrt.bench.device_memory import memory_for
    from commrt.bench.timing_loop import numpy_dtype

    number, elements = job["number"], job["elements"]
    memory = memory_for(comm, job["device"], "host")
    dtype = numpy_dtype(job["dtype"])
    whole = memory.empty(number * elements, dtype)
    arrays = [memory.empty(elements, dtype) for _ in range(number)]
    for each in (whole, *arrays):
        memory.fill(each, 0)
    limits = {"time_limit_s": job["time_limit_s"]}
    if job["nbytes"] is not None:
        limits["nbytes"] = job["nbytes"]

    def one() -> None:
        comm.allreduce(whole)

    def fused() -> None:
        with comm.fused(**limits):
            requests = [comm.allreduce(each, nonblocking=True) for each in arrays]
        commrt.wait_all(requests)

    def nonblocking() -> None:
        commrt.wait_all([comm.allreduce(each, nonblocking=True) for each in arrays])

    def blocking() -> None:
        for each in arrays:
            comm.allreduce(each)

    ways = {
        "one": one,
        "fused": fused,
        "nonblocking": nonblocking,
        "blocking": blocking,
    }
    used = {way: [whole] if way == "one" else arrays for way in ways}
    valid = all(_is_right(comm, memory, used[way], call) for way, call in ways.items())
    samples = _samples(job, comm, memory, ways, used)
    return {
        "version": commrt.__version__,
        "link_class": str(comm.facts.link_class),
        "ranks": comm.size,
        "nbytes": comm.fused(**limits).nbytes,
        "valid": bool(comm.allreduce(np.array([valid]), op="land")[0]),
        "samples_us": {way: _worst(comm, times) for way, times in samples.items()},
    }


def _is_right(comm: Communicator, memory: Any, arrays: list[Any], call: Call) -> bool:
    """Run a way on values whose sum is exact, and leave zeros."""
    ones = np.ones(max(each.size for each in arrays), np.int64)
    for index, array in enumerate(arrays):
        first = (np.arange(array.size) + index) % 8
        values = first if comm.rank == 0 else ones[: array.size]
        memory.write(array, 0, values.astype(array.dtype))
    call()
    right = True
    for index, array in enumerate(arrays):
        total = (np.arange(array.size) + index) % 8 + comm.size - 1
        found = memory.read(array, 0, array.size)
        right = right and np.array_equal(found, total.astype(array.dtype))
        memory.fill(array, 0)
    return right


def _samples(
    job: Mapping[str, Any],
    comm: Communicator,
    memory: Any,
    ways: Mapping[str, Call],
    used: Mapping[str, list[Any]],
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    burst = min(5, job["iterations"])
    for turn in range(max(1, job["iterations"] // burst) + 1):
        for way, call in ways.items():
            for _ in range(burst):
                for array in used[way] if job["fresh"] else ():
                    memory.fill(array, 0)
                memory.drain()
                comm.barrier()
                spent_us = memory.timed(call, 1)
                if turn:  # the first warms up
                    times[way].append(spent_us)
    return times


def _worst(comm: Communicator, times: list[float]) -> list[float]:
    """Return, for each repetition, the time of the slowest rank."""
    found: Any = comm.allreduce(np.array(times), op="max")
    return [round(each, 2) for each in found.tolist()]


def main(path: str) -> None:
    """Run the job in ``path``; rank 0 writes the result to where it says."""
    import commrt
    from commrt.files.write import write_file

    job = json.loads(Path(path).read_text())
    comm = commrt.init()
    if job["pin"]:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[comm.rank % len(cpus)]})
    result = measure(comm, job)
    if comm.rank == 0:
        write_file(job["result"], json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
