# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench halo``: halo exchange beside mpi4py and a plain copy."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from commrt.bench.launch import LaunchError, parse_peer
from commrt.bench.machine import describe_machine
from commrt.bench.options import check_dtype
from commrt.errors import UsageError
from commrt.files.write import write_file
from commrt.launch.mpiexec import run_ranks

__all__ = ["extents", "job_of", "main", "text"]

_WORKER = Path(__file__).resolve().parent / "halo_worker.py"


def extents(option: str, written: str) -> list[int]:
    """Parse numbers such as ``256x256x256``."""
    try:
        numbers = [int(part) for part in written.lower().split("x")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or len(numbers) > 5:
        raise UsageError(
            f"{option} {written}: write 1 to 5 numbers from 1, as in 256x256x256"
        )
    return numbers


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 where a halo was not what mpi4py fills in."""
    job = job_of(args)
    wrong = False
    for ranks in args.ranks or [2]:
        if job["grid"] and math.prod(job["grid"]) != ranks:
            raise UsageError(
                f"--grid {args.grid}: has {math.prod(job['grid'])} places, expected "
                f"{ranks}, one for each rank"
            )
        results = [_launch("Open MPI", sys.executable, ranks, job, args.timeout_s)]
        for each in args.peer:
            peer = parse_peer(each)
            other = {**job, "commrt": False}
            results.append(
                _launch(peer.name, peer.python, ranks, other, args.timeout_s)
            )
        wrong |= not all(result["valid"] for result in results)
        if args.format == "json":
            report = {
                "schema": "commrt-bench/1",
                "benchmark": "halo",
                "job": job,
                "machine": describe_machine(),
                "launches": results,
            }
            print(json.dumps(report), flush=True)
        else:
            print(text(job, results), end="", flush=True)
    return 1 if wrong else 0


def job_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the job that a command line asks for."""
    check_dtype(args.dtype)
    shape = extents("--shape", args.shape)
    grid = None if args.grid is None else extents("--grid", args.grid)
    if grid is not None and len(grid) != len(shape):
        raise UsageError(
            f"--grid {args.grid}: has {len(grid)} dimensions and --shape "
            f"{len(shape)}; they must be equal"
        )
    if args.width > min(shape):
        raise UsageError(
            f"--width {args.width}: is more than the {min(shape)} cells of the block; "
            f"write a smaller width or a larger --shape"
        )
    return {
        "shape": shape,
        "grid": grid,
        "width": args.width,
        "periodic": not args.open,
        "corners": not args.faces,
        "direct": args.direct or None,
        "reduce": args.reduce,
        "dtype": args.dtype,
        "fresh": args.fresh,
        "iterations": args.iterations,
        "pin": args.pin,
        "commrt": True,
    }


def _launch(
    name: str, python: str, ranks: int, job: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="commrt-halo-") as folder:
        path, result = Path(folder, "job.json"), Path(folder, "result.json")
        write_file(path, json.dumps({**job, "result": str(result)}))
        done = run_ranks(python, ranks, [str(_WORKER), str(path)], timeout_s=timeout_s)
        if not done.ok or not result.exists():
            raise LaunchError(f"{name}: {done.describe_failure()}")
        measured: dict[str, Any] = json.loads(result.read_text())
    return {"name": name, **measured}


def text(job: Mapping[str, Any], results: list[dict[str, Any]]) -> str:
    """Return a table in OSU's manner: one line per way to fill the halo."""
    own = results[0]
    cells = "x".join(map(str, job["shape"]))
    kind = "corners" if job["corners"] else "faces only"
    if job["corners"] and job["direct"]:
        kind = "corners by direct messages"
    lines = [
        f"# commrt {own['version']}, halo {'reduce' if job['reduce'] else 'exchange'}, "
        f"{own['ranks']} ranks as "
        f"{'x'.join(map(str, own['grid']))}, "
        f"{'periodic' if job['periodic'] else 'open ends'}, links {own['link_class']}",
        f"# block {cells} {job['dtype']}, width {job['width']}, {kind}, "
        f"{own['nbytes']} bytes per rank, fields "
        f"{'rewritten' if job['fresh'] else 'unchanged'} between calls",
        f"# {'Way':28}{'Median(us)':>14}{'Min(us)':>12}{'commrt is':>14}",
    ]
    fastest = median(own["samples_us"]["commrt"])
    rows = [("commrt", own["samples_us"]["commrt"])]
    for result in results:
        if "mpi4py" in result["samples_us"]:
            label = f"mpi4py, {result['library']}"
            rows.append((label, result["samples_us"]["mpi4py"]))
    rows.append(("copy within the block", own["samples_us"]["copy"]))
    for label, times in rows:
        ratio = "" if label == "commrt" else f"{fastest / median(times):.2f}"
        lines.append(
            f"{label[:29]:30}{median(times):>14.1f}{min(times):>12.1f}{ratio:>14}"
        )
    if not own["valid"]:
        lines.append("# WRONG: the halos differ from what mpi4py filled in")
    return "\n".join(lines) + "\n"
