# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench fused``: many short allreduces, with fusion and without."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from commrt.bench.device_memory import number_of_devices
from commrt.bench.launch import LaunchError
from commrt.bench.machine import describe_machine
from commrt.bench.options import check_dtype
from commrt.errors import UsageError
from commrt.files.write import write_file
from commrt.launch.mpiexec import run_ranks
from commrt.vocabulary.dtypes import dtype_by_name

__all__ = ["WAYS", "main", "text"]

_WORKER = Path(__file__).resolve().parent / "fused_worker.py"
WAYS = {
    "one": "one allreduce of all bytes",
    "fused": "one by one, fused",
    "nonblocking": "one by one, nonblocking",
    "blocking": "one by one, blocking",
}
"""Ways that are measured, with their names in the table."""


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 where a result was wrong."""
    job = _job(args)
    wrong = False
    for ranks in args.ranks or [2]:
        result = _launch(ranks, job, args.timeout_s)
        wrong |= not result["valid"]
        if args.format == "json":
            report = {
                "schema": "commrt-bench/1",
                "benchmark": "fused",
                "job": job,
                "machine": describe_machine(),
                "launches": [result],
            }
            print(json.dumps(report), flush=True)
        else:
            print(text(job, result), end="", flush=True)
    return 1 if wrong else 0


def _job(args: argparse.Namespace) -> dict[str, Any]:
    if args.device != "cpu":
        number_of_devices(args.device)  # before any rank starts
    check_dtype(args.dtype)
    item = dtype_by_name(args.dtype).itemsize
    if args.message_size % item:
        raise UsageError(
            f"-m {args.message_size}: is not a multiple of the {item} bytes of "
            f"{args.dtype}"
        )
    return {
        "number": args.number,
        "elements": args.message_size // item,
        "dtype": args.dtype,
        "nbytes": args.bucket_size,
        "time_limit_s": args.time_limit_s,
        "fresh": args.fresh,
        "iterations": args.iterations,
        "pin": args.pin,
        "device": args.device,
    }


def _launch(ranks: int, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="commrt-fused-") as folder:
        path, result = Path(folder, "job.json"), Path(folder, "result.json")
        write_file(path, json.dumps({**job, "result": str(result)}))
        command = [str(_WORKER), str(path)]
        done = run_ranks(sys.executable, ranks, command, timeout_s=timeout_s)
        if not done.ok or not result.exists():
            raise LaunchError(f"fused: {done.describe_failure()}")
        measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def text(job: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return a table in OSU's manner: one line per way."""
    nbytes = job["elements"] * dtype_by_name(job["dtype"]).itemsize
    limit = job["time_limit_s"]
    lines = [
        f"# commrt {result['version']}, fusion, {result['ranks']} ranks, links "
        f"{result['link_class']}, arrays "
        f"{'rewritten' if job['fresh'] else 'unchanged'} between calls"
        f"{'' if job['device'] == 'cpu' else ', on ' + job['device']}",
        f"# {job['number']} allreduces of {nbytes} bytes, {job['dtype']}, in place; "
        f"buckets of {result['nbytes']} bytes, "
        f"{'no time limit' if limit is None else f'time limit {limit:g} s'}",
        f"# {'Way':28}{'Median(us)':>14}{'Min(us)':>12}{'of one':>10}",
    ]
    samples = result["samples_us"]
    one = median(samples["one"])
    for way, name in WAYS.items():
        times = samples[way]
        ratio = "" if way == "one" else f"{median(times) / one:.2f}"
        lines.append(f"{name:30}{median(times):>14.1f}{min(times):>12.1f}{ratio:>10}")
    if not result["valid"]:
        lines.append("# WRONG: a result differs from the expected one")
    return "\n".join(lines) + "\n"
