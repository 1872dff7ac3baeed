# SPDX-License-Identifier: Apache-2.0
"""A sparse matrix times dense columns on one core: ``bench spmm``.

commrt's kernel, ``scipy.sparse`` where it is installed, and ``torch.sparse.mm`` on one
thread take turns, so that all of them meet the same state of the machine; medians are
compared. Each result is compared with scipy's, or torch's, before it is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from commrt.bench.launch import torch_is_installed
from commrt.bench.machine import describe_machine
from commrt.errors import UsageError

__all__ = ["main", "measure"]


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where a result was wrong."""
    if not torch_is_installed():
        raise UsageError(
            "spmm: commrt's graph layers need torch, which is not installed: "
            'pip install "commrt[torch]"'
        )
    rows = [
        row
        for dtype in args.dtypes or ("float32", "float64")
        for row in measure(
            args.nodes, args.degree, args.widths, dtype, args.iterations, args.skew
        )
    ]
    if args.format == "json":
        report = {
            "schema": "commrt-bench/1",
            "machine": describe_machine(),
            "nodes": args.nodes,
            "degree": args.degree,
            "skew": args.skew,
            "rows": rows,
        }
        print(json.dumps(report))
    else:
        print(_text(args, rows))
    return 0 if all(row["valid"] for row in rows) else 1


def measure(
    nodes: int,
    degree: int,
    widths: list[int],
    dtype: str,
    iterations: int,
    skew: float = 0.0,
) -> list[dict[str, Any]]:
    """Return medians of all libraries, by width.

    Args:
        nodes: rows and columns of the matrix.
        degree: entries for each of them.
        widths: columns of the dense matrix.
        dtype: of both.
        iterations: turns of each library.
        skew: node i is drawn in proportion to (i + 1) ** -skew; 0: evenly.
    """
    import torch

    from commrt.layers.graphs.csr import CsrMatrix

    draws = np.random.default_rng(1)
    part = np.arange(1, nodes + 1) ** -skew
    ends = draws.choice(nodes, (2, nodes * degree), p=part / part.sum())
    places = np.unique(ends[0] * nodes + ends[1])
    values = draws.standard_normal(len(places)).astype(dtype)
    a = CsrMatrix.from_entries(places // nodes, places % nodes, values, (nodes, nodes))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_row(a, width, iterations, draws) for width in widths]
    finally:
        torch.set_num_threads(threads)


def _row(
    a: Any, width: int, iterations: int, draws: np.random.Generator
) -> dict[str, Any]:
    x = draws.standard_normal((a.shape[1], width)).astype(a.data.dtype)
    out = np.empty((a.shape[0], width), a.data.dtype)
    calls: dict[str, Callable[[], Any]] = {"commrt": lambda: a.times(x, out)}
    calls.update(_peers(a, x))
    results = {name: np.asarray(call()) for name, call in calls.items()}
    wide = a.data.dtype == np.float64
    expected = results["torch"]
    off = np.abs(results["commrt"] - expected).max(initial=0.0)
    valid = off <= (1e-12 if wide else 1e-4) * np.abs(expected).max(initial=1.0)
    if "scipy" in results:  # which adds in the same order
        valid = valid and np.array_equal(results["commrt"], results["scipy"])
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(iterations):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each) for name, each in samples.items()}
    return {
        "dtype": a.data.dtype.name,
        "width": width,
        "entries": a.num_entries,
        "valid": bool(valid),
        "median_ms": {name: 1e3 * each for name, each in medians.items()},
        "multiplications_per_s": a.num_entries * width / medians["commrt"],
        "samples_ms": {
            name: [1e3 * each for each in some] for name, some in samples.items()
        },
    }


def _peers(a: Any, x: Any) -> dict[str, Callable[[], Any]]:
    """Return calls of the other libraries, those that are installed."""
    import torch

    arrays = [np.array(each) for each in (a.indptr, a.indices, a.data)]
    tensor = torch.sparse_csr_tensor(
        *map(torch.from_numpy, arrays), a.shape, check_invariants=True
    )
    dense = torch.from_numpy(x)
    found: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.sparse.mm(tensor, dense)
    }
    if importlib.util.find_spec("scipy") is not None:
        sparse: Any = importlib.import_module("scipy.sparse")
        matrix = sparse.csr_matrix((arrays[2], arrays[1], arrays[0]), a.shape)
        found["scipy"] = lambda: matrix @ x
    return found


def _text(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    peers = [name for name in ("scipy", "torch") if name in rows[0]["median_ms"]]
    heads = "".join(f"{name + '(ms)':>11} {name + '/commrt':>13}" for name in peers)
    lines = [
        f"# A x on one core, {args.nodes} nodes, {rows[0]['entries']} entries, "
        f"skew {args.skew}, indices int32; medians of {args.iterations} turns",
        f"# {'Type':<8} {'Columns':>7} {'commrt(ms)':>11} {'10^9 mul/s':>11}{heads}",
    ]
    for row in rows:
        took = row["median_ms"]
        ratios = "".join(
            f"{took[name]:>11.3f} {took[name] / took['commrt']:>13.2f}"
            for name in peers
        )
        lines.append(
            f"  {row['dtype']:<8} {row['width']:>7} {took['commrt']:>11.3f} "
            f"{row['multiplications_per_s'] / 1e9:>11.2f}{ratios}"
            f"{'' if row['valid'] else '  WRONG'}"
        )
    return "\n".join(lines)
