# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench``: run one benchmark and print its results."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from commrt.bench import compare, formats
from commrt.bench.import_cost import measure_import
from commrt.bench.launch import PeerSpec, launch, make_job
from commrt.bench.machine import describe_machine
from commrt.bench.options import POINT_TO_POINT, osu_range, parse
from commrt.console import until_reader_leaves
from commrt.dtypes import dtype_by_name
from commrt.errors import CommError, UsageError
from commrt.launch import detect
from commrt.operations import operation

__all__ = ["about", "main"]

_SELF = PeerSpec("commrt", "commrt", sys.executable)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0, 1 (a wrong result) or 2 (usage, launch)."""
    try:
        args = parse(argv)
        return until_reader_leaves(lambda: _dispatch(args))
    except CommError as error:
        print(f"commrt.bench: {error}", file=sys.stderr)
        return 2


def _dispatch(args: argparse.Namespace) -> int:
    if args.benchmark == "compare":
        return compare.main(args)
    if args.benchmark == "import":
        return _import(args)
    if args.benchmark == "submit":
        return _submit(args)
    return _benchmark(args)


def _benchmark(args: argparse.Namespace) -> int:
    coll, jobs = _jobs(args)
    algorithm = getattr(args, "algorithm", None)
    env = {"COMMRT_ALGORITHM": f"{coll}:{algorithm}"} if algorithm else {}
    wrong = False
    for results in _run(args, jobs, env):
        print(_text(args, coll, jobs, results), end="")
        wrong |= any(not row["valid"] for result in results for row in result["rows"])
    return 1 if wrong else 0


def _jobs(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Return the operation and the jobs that a command line asks for."""
    sizes = osu_range(args.message_size, dtype_by_name(args.dtype).itemsize)
    settings = _settings(args)
    point_to_point = args.benchmark in POINT_TO_POINT
    if args.format == "nccl" and (point_to_point or args.nonblocking):
        raise UsageError(
            "--format nccl: nccl-tests has a layout for blocking collectives only; "
            "use osu or json"
        )
    if point_to_point:
        if min(args.ranks) < 2:
            raise UsageError(f"{args.benchmark} needs at least 2 ranks")
        settings.update(mode=args.benchmark, window=args.window)
        # Not an operation of the table: the size is the message's, as in allreduce.
        return "allreduce", [make_job("allreduce", sizes, **settings)]
    spec = operation(args.benchmark)
    if args.in_place and not spec.in_place:
        raise UsageError(
            f"--in-place: {spec.name} has no in-place form; run it without"
        )
    settings.update(
        root=args.root_rank,
        mode="nonblocking" if args.nonblocking else "blocking",
        num_tests=args.num_test_calls,
    )
    modes = [args.in_place]
    if args.format == "nccl" and spec.in_place and not args.in_place:
        modes = [False, True]
    return spec.name, [
        make_job(spec.name, sizes, in_place=in_place, **settings) for in_place in modes
    ]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that every kind of job has."""
    return {
        "dtype": args.dtype,
        "iterations": args.iterations,
        "budget_s": args.budget_s,
        "pin": args.pin,
        **{key: vars(args)[key] for key in ("fresh", "warmup") if key in vars(args)},
    }


def _run(
    args: argparse.Namespace, jobs: list[dict[str, Any]], env: dict[str, str]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the jobs' results for each number of ranks; only rank 0 has any."""
    if detect().kind == "single":
        for ranks in args.ranks:
            yield [
                launch(_SELF, ranks, job, timeout_s=args.timeout_s, env=env)
                for job in jobs
            ]
        return
    from commrt.bench import worker

    os.environ.update(env)
    results = [result for job in jobs if (result := worker.run(job)) is not None]
    if results:
        yield results


def _command() -> list[str]:
    return ["python", "-m", "commrt.bench", *sys.argv[1:]]


def _text(
    args: argparse.Namespace,
    coll: str,
    jobs: list[dict[str, Any]],
    results: list[dict[str, Any]],
) -> str:
    """Return the results in the chosen format."""
    job, result = jobs[0], results[0]
    if args.format == "json":
        return _json(job, result)
    if args.format == "nccl":
        rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for one, measured in zip(jobs, results, strict=True):
            rows[one["in_place"]] = measured["rows"]
        return formats.nccl_text(
            rows[False],
            rows[True],
            coll=coll,
            ranks=result["ranks"],
            dtype=job["dtype"],
            root=job["root"],
            library=about(result, job),
        )
    text = formats.osu_text(
        result["rows"],
        coll=coll,
        mode=job["mode"],
        dtype=job["dtype"],
        full=args.full,
        validation=args.validation,
    )
    return f"# {about(result, job)}\n{text}"


def _json(job: dict[str, Any], result: dict[str, Any]) -> str:
    machine = describe_machine()
    text = formats.json_text(result, command=_command(), machine=machine, job=job)
    return text + "\n"


def about(result: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """Return one line on who was measured, and in which state of the machine."""
    classes = sorted({row["link_class"] for row in result["rows"]}) or ["unknown"]
    inputs = "rewritten between calls" if job["fresh"] else "unchanged between calls"
    return (
        f"{result['library']}, {result['ranks']} ranks, links {'/'.join(classes)}, "
        f"table {result['table_digest']}, inputs {inputs}"
    )


def _submit(args: argparse.Namespace) -> int:
    settings = {**_settings(args), "mode": "submit"}
    job = make_job(args.op, args.sizes, **settings)
    for results in _run(args, [job], {}):
        result = results[0]
        if args.format == "json":
            print(_json(job, result), end="")
            continue
        print(f"# {about(result, job)}")
        print(f"# caller time of {args.op}(..., nonblocking=True), clock subtracted")
        for row in result["rows"]:
            ordered = sorted(row["samples_us"])
            p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
            print(
                f"{row['nbytes']:<10d} {row['median_us']:8.2f} us  "
                f"[{row['low_us']:.2f}, {row['high_us']:.2f}]  p99 {p99:.2f} us"
            )
    return 0


def _import(args: argparse.Namespace) -> int:
    cost = measure_import(args.pairs)
    if args.format == "json":
        report = {
            "schema": "commrt-bench/1",
            "command": _command(),
            "machine": describe_machine(),
            **asdict(cost),
        }
        print(json.dumps(report))
    else:
        print(cost.describe())
    return 1 if cost.started else 0
