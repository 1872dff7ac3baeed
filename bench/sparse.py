# SPDX-License-Identifier: Apache-2.0
"""Sparse allreduce against the dense one, and its merge kernel: ``bench sparse``.

Every rank draws its own indices, evenly over the vector. Dense and sparse calls take
turns within one run, and medians are compared; each sparse result is compared with the
dense one before it is timed. The time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from commrt import _native
from commrt.bench.own_ranks import report, tell
from commrt.sparse.cost import Question, estimated_fill, predicted_us, prices_of
from commrt.sparse.memory import Pool

__all__ = ["AUTO", "main", "measure", "merge_rates"]

AUTO = "auto"
"""In place of an algorithm: the one that is chosen."""
_FLOAT32 = 11


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where a result was wrong."""
    if args.kernels:
        rates = merge_rates(args.elements, args.densities)
        print(json.dumps(rates) if args.format == "json" else _kernel_text(rates))
        return 0
    job = {
        "elements": args.elements,
        "densities": args.densities,
        "algorithms": args.algorithms or [AUTO],
        "iterations": args.iterations,
        "result": args.result,
        "warm": args.warm,
    }
    return report(args, job, "commrt.bench.sparse", measure, _text)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; the result is rank 0's."""
    import commrt

    runtime: Any = commrt
    comm = runtime.init()
    length = int(job["elements"])
    x, total = np.empty(length, np.float32), np.empty(length, np.float32)
    rows = []
    for density in job["densities"]:
        rng = np.random.default_rng((comm.rank, int(1e9 * density)))
        indices = np.flatnonzero(rng.random(length) < density).astype(np.int32)
        values = rng.integers(1, 9, len(indices)).astype(np.float32)
        x.fill(0)
        x[indices] = values
        calls: dict[str, Callable[[], Any]] = {
            "dense": lambda: comm.allreduce(x, out=total)
        }
        for name in job["algorithms"]:
            calls[name] = _call(comm, (indices, values, length), name, job["result"])
        rows += _rows(comm, calls, total, density, int(job["iterations"]), job)
    about = {
        "ranks": comm.size,
        "nodes": comm.facts.nodes,
        "link_class": comm.facts.link_class,
    }
    return {**about, "rows": rows} if comm.rank == 0 else None


def _call(comm: Any, x: Any, name: str, form: str) -> Callable[[], Any]:
    algorithm = None if name == AUTO else name
    return lambda: comm.sparse_allreduce(x, algorithm=algorithm, result=form)


def _rows(
    comm: Any,
    calls: Mapping[str, Callable[[], Any]],
    total: Any,
    density: float,
    iterations: int,
    job: Mapping[str, Any],
) -> list[dict[str, Any]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    ran, valid, nnz, fill, model = {}, {}, {}, 0.0, {}
    turns = [(turn, name) for turn in range(iterations + 1) for name in calls]
    if job["warm"]:
        turns.sort(key=lambda each: list(calls).index(each[1]))
    for turn, name in turns:  # the first of each is not timed, but checked
        comm.barrier()
        start = time.perf_counter()
        result = calls[name]()
        took = np.array([time.perf_counter() - start])
        comm.allreduce(took, op="max")
        if turn:
            samples[name].append(1e6 * float(took[0]))
        elif name != "dense":
            report = comm.sparse_report
            ran[name], nnz[name] = report.algorithm, report.output_nnz
            whole = result.to_dense() if hasattr(result, "to_dense") else result
            right = np.array([float(np.array_equal(whole, total))])
            valid[name] = bool(comm.allreduce(right, op="min")[0])
            fill = estimated_fill(report.counts, len(total))
            shared = report.shared
            question = _question(comm, len(total), job["result"], shared)
            model[name] = predicted_us(question, ran[name], fill)
        del result
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


def _question(comm: Any, length: int, form: str, shared: bool) -> Question:
    facts = comm.facts
    prices = prices_of(facts)
    return Question(comm.size, facts.nodes, length, 4, 4, form, prices, shared=shared)


def _text(job: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    lines = [
        f"# commrt sparse allreduce, {found['ranks']} ranks on {found['nodes']} "
        f"node(s), links {found['link_class']}, {job['elements']} elements float32, "
        f"indices int32, result {job['result']}, "
        f"{'calls of a kind in a row' if job['warm'] else 'kinds in turn'}",
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
