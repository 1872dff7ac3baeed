# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that run one job per number of ranks: here, or on ranks of their own."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commrt.bench.machine import describe_machine
from commrt.errors import BackendError
from commrt.files.write import write_file
from commrt.launch.detect import detect
from commrt.launch.mpiexec import run_ranks

__all__ = ["report", "tell"]

Found = dict[str, Any]


def report(
    args: argparse.Namespace,
    job: Mapping[str, Any],
    module: str,
    measure: Callable[[Mapping[str, Any]], Found | None],
    text: Callable[[Mapping[str, Any], Found], str],
) -> int:
    """Measure and print; return 1 where a result was wrong.

    Outside mpiexec, ``module`` is started on ranks, with the job and a file as its
    arguments; it calls ``tell`` with what ``measure`` returns.
    """
    wrong = False
    for ranks in args.ranks or [2]:
        if detect().kind == "single":
            found: Found | None = _launched(module, job, ranks, args.timeout_s)
        else:
            found = measure(job)
        if found is None:
            continue
        wrong |= not all(row["valid"] for row in found["rows"])
        if args.format == "json":
            about = {"schema": "commrt-bench/1", "machine": describe_machine()}
            print(json.dumps({**about, "job": job, **found}), flush=True)
        else:
            print(text(job, found), flush=True)
    return 1 if wrong else 0


def tell(found: Found) -> None:
    """Write what was found for who launched this process, to the file that it named."""
    write_file(Path(sys.argv[2]), json.dumps(found))


def _launched(
    module: str, job: Mapping[str, Any], ranks: int, timeout_s: float
) -> Found:
    # By a file: Open MPI's launcher passes printed lines on in pieces of 2 KiB, and on
    # a busy machine a long line came back damaged.
    with tempfile.TemporaryDirectory(prefix="commrt-bench-") as folder:
        result = Path(folder, "result.json")
        code = ["-m", module, json.dumps(job), str(result)]
        done = run_ranks(sys.executable, ranks, code, timeout_s=timeout_s)
        if not done.ok or not result.exists():
            raise BackendError(f"{module} on {ranks} ranks: {done.describe_failure()}")
        found: Found = json.loads(result.read_text())
    return found
