# SPDX-License-Identifier: Apache-2.0
"""Sparse allreduce against the dense one, and its merge kernel: ``bench sparse``.

Every rank draws its own indices, evenly over the vector. Dense and sparse calls take
turns within one run, and medians are compared; each sparse result is compared with the
dense one before it is timed. The time is that of the slowest rank; on a device it is
the host's, from before the call until its stream is empty.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import _native
from commrt.bench.device_memory import memory_for, number_of_devices, placed, seen
from commrt.bench.own_ranks import report, tell
from commrt.bench.timing_loop import Memory
from commrt.sparse.cost import Question, estimated_fill, predicted_us, prices_of
from commrt.sparse.memory import Pool
from commrt.sparse.vector import SparseVector

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["AUTO", "main", "measure", "measure_on", "merge_rates"]

AUTO = "auto"
"""Name that stands for the algorithm that commrt chooses."""
_FLOAT32 = 11


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where a result was wrong."""
    if args.kernels:
        rates = merge_rates(args.elements, args.densities)
        print(json.dumps(rates) if args.format == "json" else _kernel_text(rates))
        return 0
    if args.device != "cpu":
        number_of_devices(args.device)  # before any rank starts
    job = {
        "elements": args.elements,
        "densities": args.densities,
        "algorithms": args.algorithms or [AUTO],
        "iterations": args.iterations,
        "result": args.result,
        "warm": args.warm,
        "device": args.device,
    }
    return report(args, job, "commrt.bench.sparse", measure, _text)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; the result is rank 0's."""
    import commrt

    runtime: Any = commrt
    return measure_on(runtime.init(), job)


def measure_on(comm: Communicator, job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on a communicator; the result is rank 0's."""
    length = int(job["elements"])
    memory = memory_for(comm, job.get("device", "cpu"), "host")
    whole = np.empty(length, np.float32)
    x, total = (memory.empty(length, whole.dtype) for _ in range(2))
    rows = []
    for density in job["densities"]:
        rng = np.random.default_rng((comm.rank, int(1e9 * density)))
        indices = np.flatnonzero(rng.random(length) < density).astype(np.int32)
        values = rng.integers(1, 9, len(indices)).astype(np.float32)
        whole.fill(0)
        whole[indices] = values
        memory.write(x, 0, whole)
        entries = placed(memory, indices), placed(memory, values), length
        calls: dict[str, Callable[[], Any]] = {
            "dense": lambda: comm.allreduce(x, out=total)
        }
        for name in job["algorithms"]:
            calls[name] = _call(comm, entries, name, job["result"])
        rows += _rows(comm, memory, calls, total, density, job)
    about = {
        "ranks": comm.size,
        "nodes": comm.facts.nodes,
        "link_class": comm.facts.link_class,
    }
    return {**about, "rows": rows} if comm.rank == 0 else None


def _call(comm: Communicator, x: Any, name: str, form: str) -> Callable[[], Any]:
    algorithm = None if name == AUTO else name
    return lambda: comm.sparse_allreduce(x, algorithm=algorithm, result=form)


def _rows(
    comm: Communicator,
    memory: Memory,
    calls: Mapping[str, Callable[[], Any]],
    total: Any,
    density: float,
    job: Mapping[str, Any],
) -> list[dict[str, Any]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    ran, valid, nnz, fill, model = {}, {}, {}, 0.0, {}
    repetitions = range(int(job["iterations"]) + 1)
    turns = [(turn, name) for turn in repetitions for name in calls]
    if job["warm"]:
        turns.sort(key=lambda each: list(calls).index(each[1]))
    for turn, name in turns:  # the first of each is not timed, but checked
        memory.drain()
        comm.barrier()
        us, result = _timed(memory, calls[name])
        took = np.array([us])
        comm.allreduce(took, op="max")
        if turn:
            samples[name].append(float(took[0]))
        elif name != "dense":
            report = comm.sparse_report
            assert report is not None, "a sparse sum has just ended"
            ran[name], nnz[name] = report.algorithm, report.output_nnz
            expected = memory.read(total, 0, total.size)
            right = np.array([float(np.array_equal(_dense(memory, result), expected))])
            valid[name] = bool(comm.allreduce(right, op="min")[0])
            fill = estimated_fill(report.counts, total.size)
            shared = report.shared
            question = _question(comm, total.size, job["result"], shared)
            model[name] = predicted_us(question, ran[name], fill)
        del result  # its memory is the next result's
    dense_us = statistics.median(samples["dense"])
    return [
        {
            "density": density,
            "fill": fill,
            "algorithm": name,
            "ran": ran[name],
            "valid": valid[name],
            "output_nnz": nnz[name],
            "dense_us": dense_us,
            "median_us": statistics.median(samples[name]),
            "model_us": model[name],
            "samples_us": samples[name],
        }
        for name in calls
        if name != "dense"
    ]


def _timed(memory: Memory, call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the µs that a call takes, and what it returns."""
    kept: list[Any] = []
    us = memory.timed(lambda: kept.append(call()), 1)
    return us, kept[0]


def _dense(memory: Memory, result: Any) -> Any:
    """Return a result as an array of the host."""
    if not isinstance(result, SparseVector):
        return seen(memory, result)
    values, indices = seen(memory, result.values), seen(memory, result.indices)
    return SparseVector(indices, values, result.shape).to_dense()


def _question(comm: Communicator, length: int, form: str, shared: bool) -> Question:
    facts = comm.facts
    prices = prices_of(facts)
    return Question(comm.size, facts.nodes, length, 4, 4, form, prices, shared=shared)


def _text(job: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    lines = [
        f"# commrt sparse allreduce, {found['ranks']} ranks on {found['nodes']} "
        f"node(s), links {found['link_class']}, {job['elements']} elements float32, "
        f"indices int32, result {job['result']}, "
        f"{'calls of a kind in a row' if job['warm'] else 'kinds in turn'}"
        f"{'' if job['device'] == 'cpu' else ', on ' + job['device']}",
        f"# {'Density':>9} {'Fill':>8} {'Algorithm':<19} {'Sparse(us)':>11} "
        f"{'Dense(us)':>11} {'Dense/sparse':>12} {'Model(us)':>10}",
    ]
    for row in found["rows"]:
        name = row["ran"] if row["algorithm"] != AUTO else f"auto: {row['ran']}"
        ratio = row["dense_us"] / row["median_us"]
        lines.append(
            f"{row['density']:>11.5f} {row['fill']:>8.5f} {name:<19} "
            f"{row['median_us']:>11.1f} {row['dense_us']:>11.1f} {ratio:>12.2f} "
            f"{row['model_us']:>10.1f}{'' if row['valid'] else '  WRONG'}"
        )
    return "\n".join(lines)


def merge_rates(length: int, densities: list[float]) -> list[dict[str, float]]:
    """Return entries per second that one core adds up: of two vectors of a density,
    merged, and of four, marked."""
    pool, rates = Pool(), []
    for density in densities:
        rng = np.random.default_rng(1)
        lists, kept = [], []
        for _ in range(4):
            indices = np.flatnonzero(rng.random(length) < density).astype(np.int32)
            values = np.ones(len(indices), np.float32)
            kept.append((indices, values))
            lists.append((indices.ctypes.data, values.ctypes.data, len(indices)))
        two, four = (sum(count for _, _, count in lists[:n]) for n in (2, 4))
        outs = pool.take(4 * four), pool.take(4 * four)
        addresses = outs[0].ctypes.data, outs[1].ctypes.data

        def merge(lists: Any = lists, to: Any = addresses) -> None:
            _native.sparse.merge(4, _FLOAT32, *lists[0], *lists[1], *to)

        def mark(lists: Any = lists, to: Any = addresses) -> None:
            _native.sparse.sum(4, _FLOAT32, lists, 0, length, *to)

        rates.append(
            {
                "density": density,
                "entries": two,
                "per_second": two / _median_s(merge),
                "marked_per_second": four / _median_s(mark),
            }
        )
    return rates


def _median_s(call: Callable[[], None]) -> float:
    took = []
    for _ in range(30):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def _kernel_text(rates: list[dict[str, float]]) -> str:
    lines = [
        "# 10^6 entries per second and core: of two vectors, merged; of four, marked",
        "#   Density    Entries     Merged     Marked",
    ]
    lines += [
        f"{rate['density']:>11.5f} {rate['entries']:>10.0f} "
        f"{rate['per_second'] / 1e6:>10.0f} {rate['marked_per_second'] / 1e6:>10.0f}"
        for rate in rates
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    _found = measure(json.loads(sys.argv[1]))
    if _found is not None:
        tell(_found)
