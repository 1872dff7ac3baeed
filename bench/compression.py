# SPDX-License-Identifier: Apache-2.0
"""Compressed operations against plain ones, and their kernels: ``bench compress``.

Plain and compressed calls take turns within one run, and medians are compared; each
compressed result is compared with the plain one, within its bound, before it is timed.
The time is that of the slowest rank; on a device it is the host's, from before the
call until its stream is empty.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import _native
from commrt.bench.device_memory import memory_for, number_of_devices, placed
from commrt.bench.own_ranks import report, tell
from commrt.bench.timing_loop import Memory
from commrt.vocabulary.operations import operation
from commrt.vocabulary.wire_formats import WIRE_FORMATS, WireFormat, wire_format

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = [
    "break_even_gb_per_s",
    "describe",
    "is_near",
    "kernel_rates",
    "main",
    "measure",
    "measure_on",
]

_FLOAT32 = 11
_PLAIN = "none"


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where a result was wrong."""
    if args.kernels:
        rates = kernel_rates(args.sizes)
        print(json.dumps(rates) if args.format == "json" else _kernel_text(rates))
        return 0
    if args.device != "cpu":
        number_of_devices(args.device)  # before any rank starts
    job = {
        "op": args.op,
        "sizes": args.sizes,
        "iterations": args.iterations,
        "residual": args.residual,
        "device": args.device,
    }
    return report(args, job, "commrt.bench.compression", measure, describe)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; the result is rank 0's."""
    import commrt

    runtime: Any = commrt
    return measure_on(runtime.init(), job)


def measure_on(comm: Communicator, job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on a communicator; the result is rank 0's."""
    memory = memory_for(comm, job.get("device", "cpu"), "host")
    rows = []
    for nbytes in job["sizes"]:
        rows += _rows(comm, memory, job, max(1, nbytes // 4 // comm.size) * comm.size)
    about = {
        "ranks": comm.size,
        "nodes": comm.facts.nodes,
        "link_class": comm.facts.link_class,
    }
    return {**about, "rows": rows} if comm.rank == 0 else None


def _rows(
    comm: Communicator, memory: Memory, job: Mapping[str, Any], count: int
) -> list[dict[str, Any]]:
    mine = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
    x = placed(memory, mine)
    out, plain = (memory.empty(count, mine.dtype) for _ in range(2))
    method = getattr(comm, job["op"])
    calls: dict[str, Callable[[], Any]] = {_PLAIN: lambda: method(x, out=plain)}
    for one in WIRE_FORMATS:
        owed = placed(memory, np.zeros_like(mine)) if job["residual"] else None
        more = {} if owed is None else {"residual": owed}
        calls[one.name] = _call(method, x, out, one.name, more)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    valid = dict.fromkeys(calls, True)
    for turn in range(job["iterations"] + 1):  # the first is not timed, but checked
        for name, call in calls.items():
            memory.drain()
            comm.barrier()
            took = np.array([memory.timed(call, 1)])
            comm.allreduce(took, op="max")
            if turn:
                samples[name].append(float(took[0]))
            elif name != _PLAIN:
                got, exact = (memory.read(each, 0, count) for each in (out, plain))
                valid[name] = is_near(comm, job["op"], name, mine, exact, got)
    plain_us = statistics.median(samples[_PLAIN])
    return [
        {
            "nbytes": mine.nbytes,
            "compress": name,
            "valid": valid[name],
            "plain_us": plain_us,
            "median_us": statistics.median(samples[name]),
            "samples_us": samples[name],
        }
        for name in calls
        if name != _PLAIN
    ]


def _call(
    method: Any, x: Any, out: Any, name: str, more: Mapping[str, Any]
) -> Callable[[], Any]:
    return lambda: method(x, out=out, compress=name, **more)


_RELATIVE = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 0.5001 / 127}


def is_near(
    comm: Communicator, op: str, name: str, x: Any, plain: Any, out: Any
) -> bool:
    """Return whether all ranks' results lie within the bound of the largest element."""
    largest = np.array([np.abs(x).max(), np.abs(plain).max()])
    comm.allreduce(largest, op="max")
    parts = comm.size if operation(op).reduces else 1
    limit = 1.01 * _RELATIVE[name] * (parts * largest[0] + largest[1])
    near = np.array([float(np.abs(out - plain).max() <= limit)])
    comm.allreduce(near, op="min")
    return bool(near[0])


def describe(job: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the result for people."""
    lines = [
        f"# commrt {job['op']} compressed, {found['ranks']} ranks on {found['nodes']} "
        f"node(s), links {found['link_class']}, float32, plain and compressed in turn"
        f"{', with residual' if job['residual'] else ''}"
        f"{'' if job.get('device', 'cpu') == 'cpu' else ', on ' + job['device']}",
        f"# {'Size':>10} {'Compress':<10} {'Plain(us)':>12} {'Compressed(us)':>15} "
        f"{'Compressed/plain':>17}",
    ]
    for row in found["rows"]:
        lines.append(
            f"{row['nbytes']:>12} {row['compress']:<10} {row['plain_us']:>12.1f} "
            f"{row['median_us']:>15.1f} {row['median_us'] / row['plain_us']:>17.2f}"
            f"{'' if row['valid'] else '  WRONG'}"
        )
    return "\n".join(lines)


# -- kernels ---------------------------------------------------------------------


def kernel_rates(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the 10^9 bytes of float32 that one core handles in a second."""
    rates = []
    for nbytes in sizes:
        count = max(1, nbytes // 4)
        x = np.random.default_rng(1).standard_normal(count).astype(np.float32)
        y, residual = np.empty_like(x), np.zeros_like(x)
        copy = _rate(4 * count, lambda: np.copyto(y, x))  # noqa: B023  called at once
        for one in WIRE_FORMATS:
            row = {"nbytes": 4 * count, "compress": one.name, "copy": copy}
            rates.append({**row, **_rates_of(one, x, y, residual)})
    return rates


def _rates_of(one: WireFormat, x: Any, y: Any, residual: Any) -> dict[str, float]:
    count, wire = x.size, _native.wire
    room = [np.zeros(wire.nbytes(one.code, count) + 64, np.uint8) for _ in range(2)]
    said, summed = (each.ctypes.data + -each.ctypes.data % 64 for each in room)
    at, to, owed = x.ctypes.data, y.ctypes.data, residual.ctypes.data
    kind = one.code, _FLOAT32
    calls: dict[str, Callable[[], None]] = {
        "encode": lambda: wire.encode(*kind, at, 0, count, said),
        "sum": lambda: wire.sum(*kind, [said, said], 0, at, 0, count, 1.0, summed, 0),
        "decode": lambda: wire.decode(*kind, said, count, to),
        "settle": lambda: wire.settle(*kind, said, count, at, owed),
    }
    return {name: _rate(x.nbytes, call) for name, call in calls.items()}


def _rate(nbytes: int, call: Callable[[], object]) -> float:
    took = []
    for _ in range(13):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return nbytes / statistics.median(took[3:]) / 1e9


def break_even_gb_per_s(rates: Mapping[str, Any], ranks: int | None = None) -> float:
    """Return the bandwidth per rank below which a compressed allreduce is faster.

    In 10^9 bytes per second, each way. Plain: 2 (P-1)/P of the vector each way, and the
    sums are free. Compressed: that in fewer bytes, and (P-1)/P of the vector is encoded
    and summed, all of it decoded, one after the other. ``ranks``: P; None: many.
    """
    part = 1.0 if ranks is None else (ranks - 1) / ranks
    itemsize = wire_format(rates["compress"]).itemsize
    saved = 2 * part * (1 - itemsize / 4)
    encode, add, decode = (float(rates[kind]) for kind in ("encode", "sum", "decode"))
    return saved / (part / encode + part / add + 1 / decode)


def _kernel_text(rates: list[dict[str, Any]]) -> str:
    lines = [
        "# 10^9 bytes of float32 per second on one core; the last column: links that "
        "carry less, each way, are faster with compression (many ranks)",
        f"# {'Size':>10} {'Compress':<10} {'Copy':>7} {'Encode':>7} {'Sum':>7} "
        f"{'Decode':>7} {'Settle':>7} {'Break-even':>11}",
    ]
    for rate in rates:
        lines.append(
            f"{rate['nbytes']:>12} {rate['compress']:<10} {rate['copy']:>7.1f} "
            f"{rate['encode']:>7.1f} {rate['sum']:>7.1f} {rate['decode']:>7.1f} "
            f"{rate['settle']:>7.1f} {break_even_gb_per_s(rate):>11.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    _found = measure(json.loads(sys.argv[1]))
    if _found is not None:
        tell(_found)
