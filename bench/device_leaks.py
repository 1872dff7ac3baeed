# SPDX-License-Identifier: Apache-2.0
"""Many calls on a device, and what they leave behind: ``bench leaks``.

Collectives, as chosen and staged, and messages around a ring, 32 at a time under way.
After a tenth of them, and at the end, are counted: the process's memory, commrt's
pinned memory and events, and calls whose end the host has not seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.device_memory import DeviceMemory, local_rank, open_memory
from commrt.bench.own_ranks import report, tell
from commrt.comm import core_of

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = [
    "MOST_NBYTES",
    "main",
    "measure",
    "nothing_is_left",
    "run_calls",
    "text",
]

_WINDOW = 32
_COUNT = 64
MOST_NBYTES = 1 << 20
"""Bytes that the process may have grown by, beside a tenth of a byte for each call."""


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where something is left."""
    args.ranks = args.ranks or [1]
    job = {"device": args.device, "number": args.number}
    return report(args, job, "commrt.bench.device_leaks", measure, text)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; the result is rank 0's."""
    import commrt

    runtime: Any = commrt
    comm = runtime.init()
    place = local_rank(comm.rank, comm.facts.layout)
    memory = open_memory(job["device"], "host", place)
    start = time.monotonic()
    mine = run_calls(comm, memory, int(job["number"]))
    worst = {name: _worst(comm, value) for name, value in mine.items()}
    number = int(job["number"])
    row = {"valid": nothing_is_left(number, worst), "number": number, **worst}
    about = {"ranks": comm.size, "elapsed_s": time.monotonic() - start}
    return {**about, "rows": [row]} if comm.rank == 0 else None


def nothing_is_left(number: int, grown: Mapping[str, int]) -> bool:
    """Return whether so many calls left memory as it was, as far as can be seen."""
    kept = max(grown["events"], grown["pinned_nbytes"], 0)
    ended = not grown["under_way"] and not grown["wrong"]
    small = grown["resident_nbytes"] <= MOST_NBYTES + number // 10
    return ended and small and not kept


def run_calls(comm: Communicator, memory: DeviceMemory, number: int) -> dict[str, int]:
    """Make so many calls; return what grew from a tenth of them to the end."""
    # Calls that are in flight together write to arrays of their own.
    x, *outs = (
        memory.empty(_COUNT, np.dtype("float32")) for _ in range(1 + _WINDOW // 4 * 3)
    )
    memory.fill(x, 1)
    first = max(1, number // 10)
    _calls(comm, x, outs, first)
    memory.drain()
    before = _held(comm, memory)
    _calls(comm, x, outs, number - first)
    memory.drain()
    after = _held(comm, memory)
    found = {name: after[name] - before[name] for name in before}
    found["under_way"] = int(core_of(comm).devices.outstanding)
    wrong = sum(bool((memory.read(out, 0, _COUNT) != 1).any()) for out in outs)
    return {**found, "wrong": wrong}


def _calls(comm: Communicator, x: Any, outs: list[Any], number: int) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    done = 0
    while done < number:
        requests = []
        for first, second, third in zip(outs[::3], outs[1::3], outs[2::3], strict=True):
            requests += [
                comm.allreduce(x, op="max", out=first, nonblocking=True),
                comm.allreduce(
                    x, op="max", out=second, backend="staged", nonblocking=True
                ),
                comm.recv(third, source=left, nonblocking=True),
                comm.send(x, dest=right, nonblocking=True),
            ]
        for request in requests:
            request.synchronize()
        done += len(requests)


def _held(comm: Communicator, memory: DeviceMemory) -> dict[str, int]:
    """Return the resources that this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    staging, device = core_of(comm).devices, memory.device
    workers = staging.stager(device), staging.messages(device)
    return {
        "resident_nbytes": pages * resource.getpagesize(),
        "pinned_nbytes": sum(each.pinned_nbytes for each in workers),
        "events": sum(each.num_events for each in workers),
    }


def _worst(comm: Communicator, value: int) -> int:
    largest = np.array([value], np.int64)
    comm.allreduce(largest, op="max")
    return int(largest[0])


def text(job: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the resources that are left, for people."""
    (row,) = found["rows"]
    verdict = "nothing is left" if row["valid"] else "SOMETHING IS LEFT"
    return (
        f"# {row['number']} calls on {found['ranks']} rank(s) in "
        f"{found['elapsed_s']:.1f} s, on {job['device']}: {verdict}\n"
        f"process {row['resident_nbytes']} B, pinned {row['pinned_nbytes']} B, events "
        f"{row['events']}, under way {row['under_way']}, wrong {row['wrong']}"
    )


if __name__ == "__main__":
    _found = measure(json.loads(sys.argv[1]))
    if _found is not None:
        tell(_found)
