# SPDX-License-Identifier: Apache-2.0
"""Halo exchange of a block on a device, beside copies there: ``bench halo -d``.

The same block lies in host memory, too, where the same call fills what the device's
must equal. The bound is one copy of as many bytes within the device: nothing is packed,
and nothing crosses between ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.device_memory import DeviceMemory, memory_for, placed, seen
from commrt.bench.halo import job_of
from commrt.bench.halo_worker import face_slices, halo_nbytes
from commrt.bench.own_ranks import report, tell
from commrt.bench.timing_loop import Memory, worst_over_ranks
from commrt.bench.worker import CommrtPeer
from commrt.errors import UsageError

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["main", "measure", "measured", "text"]

_TURN = 10


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where a halo was wrong."""
    job = {**job_of(args), "device": args.device, "timing": args.timing}
    for ranks in args.ranks or [2]:
        if job["grid"] and math.prod(job["grid"]) != ranks:
            raise UsageError(
                f"--grid {args.grid}: has {math.prod(job['grid'])} places, expected "
                f"{ranks}, one for each rank"
            )
    if args.peer:
        raise UsageError(
            f"--peer {args.peer[0]}: mpi4py exchanges arrays in host memory, and -d "
            f"{args.device} is not that; leave one of them out"
        )
    return report(args, job, "commrt.bench.device_halo", measure, text)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; the result is rank 0's."""
    import commrt

    runtime: Any = commrt
    comm = runtime.init()
    memory = memory_for(comm, job["device"], job["timing"])
    return measured(comm, memory, job)


def measured(
    comm: Communicator, memory: Memory, job: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the times of the exchange, on rank 0."""
    cart = comm.cart(tuple(job["grid"] or [0] * len(job["shape"])), job["periodic"])
    width, what = job["width"], "halo_reduce" if job["reduce"] else "halo_exchange"
    shape = [cells + 2 * width for cells in job["shape"]]
    rng = np.random.default_rng(comm.rank)
    block = rng.integers(0, 100, shape).astype(job["dtype"])
    field = placed(memory, block)
    given = {"corners": job["corners"], "direct": job["direct"]}
    exchange = getattr(cart.plan, what)(field, width, **given)
    exchange()
    getattr(cart.plan, what)(block, width, **given)()
    # A reverse leaves undefined values in the halo.
    inner = tuple(slice(width, -width) for _ in shape) if job["reduce"] else ...
    right = np.array_equal(seen(memory, field)[inner], block[inner])
    nbytes = halo_nbytes(block, face_slices(len(shape), width, job["corners"]))
    peer = CommrtPeer(comm, memory)
    wrong = worst_over_ranks(peer, [float(not right)])
    calls = {"commrt": exchange, "copy": _copy(memory, nbytes)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + max(1, job["iterations"] // _TURN)):
        for name, call in calls.items():
            for _ in range(min(_TURN, job["iterations"])):
                if job["fresh"]:
                    memory.fill(field, turn % 7)
                    memory.drain()
                comm.barrier()
                took_us = memory.timed(call, 1)
                if turn:  # the first warms up
                    times[name].append(took_us)
    samples = {name: worst_over_ranks(peer, each) for name, each in times.items()}
    row = {
        "grid": list(cart.dims),
        "nbytes": nbytes,
        "valid": not any(wrong),
        "samples_us": samples,
    }
    about = {"ranks": comm.size, "link_class": str(comm.facts.link_class)}
    return {**about, "rows": [row]} if comm.rank == 0 else None


def _copy(memory: Memory, nbytes: int) -> Any:
    """Return a call that copies as many bytes within the device."""
    assert isinstance(memory, DeviceMemory)
    source, target = (memory.empty(nbytes, np.dtype(np.uint8)) for _ in range(2))
    memory.fill(source, 1)

    def copy() -> None:
        memory.device.memcpy_async(
            target.address, source.address, nbytes, memory.stream.handle
        )

    return copy


def text(job: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the figures for people."""
    (row,) = found["rows"]
    samples = row["samples_us"]
    ours = statistics.median(samples["commrt"])
    what = "reduce" if job["reduce"] else "exchange"
    lines = [
        f"# halo {what} on a device ({job['device']}), {found['ranks']} ranks as "
        f"{'x'.join(map(str, row['grid']))}, links {found['link_class']}, by "
        f"{job['timing']}",
        f"# block {'x'.join(map(str, job['shape']))} {job['dtype']}, width "
        f"{job['width']}, {row['nbytes']} bytes per rank",
        f"# {'Way':28}{'Median(us)':>14}{'Min(us)':>12}{'commrt is':>14}",
        f"{'commrt':30}{ours:>14.1f}{min(samples['commrt']):>12.1f}",
    ]
    bound = statistics.median(samples["copy"])
    lines.append(
        f"{'one copy on the device':30}{bound:>14.1f}{min(samples['copy']):>12.1f}"
        f"{ours / bound:>14.2f}"
    )
    if not row["valid"]:
        lines.append("# WRONG: the halo differs from that of the host")
    return "\n".join(lines)


if __name__ == "__main__":
    _found = measure(json.loads(sys.argv[1]))
    if _found is not None:
        tell(_found)
