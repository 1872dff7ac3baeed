# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench``: run one benchmark and print its results."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from commrt.bench import (
    compare,
    compression,
    device_halo,
    device_leaks,
    device_parts,
    formats,
    fused,
    gpu_report,
    halo,
    sparse,
    spmm,
    turns,
    varying,
    worker,
)
from commrt.bench.algorithm import resolve
from commrt.bench.bench_operations import MULTI, bench_operation
from commrt.bench.device_memory import number_of_devices
from commrt.bench.engines import submit_engines
from commrt.bench.import_cost import measure_import
from commrt.bench.launch import LaunchError, PeerSpec, launch, make_job
from commrt.bench.machine import describe_machine
from commrt.bench.options import (
    POINT_TO_POINT,
    TURNS,
    check_dtype,
    osu_range,
    parse,
)
from commrt.commands.console import until_reader_leaves
from commrt.errors import CommError, DeviceMissingError, UsageError
from commrt.launch.detect import LaunchInfo, detect
from commrt.mpi import library
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import OpSpec

__all__ = ["about", "main"]

_SELF = PeerSpec("commrt", "commrt", sys.executable)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0, 1 (a wrong result) or 2 (usage, launch).

    Where the usage is wrong, ranks of a launcher other than the first return 0.
    """
    try:
        run = _prepare(parse(argv))
    except (UsageError, DeviceMissingError) as error:
        # The same on every rank of a launcher, so one of them says it. A launcher may
        # end all ranks at the first bad status: that must not come before the words.
        if not _first_rank():
            return 0
        print(f"commrt.bench: {error}", file=sys.stderr)
        return 2
    try:
        return until_reader_leaves(run)
    except CommError as error:
        print(f"commrt.bench: {error}", file=sys.stderr)
        return 2


def _first_rank() -> bool:
    try:
        return detect().rank == 0
    except UsageError:
        return True  # a launcher that nobody understands


def _prepare(args: argparse.Namespace) -> Callable[[], int]:
    """Return what runs the benchmark, once everything asked for is known to exist."""
    if args.benchmark == "halo" and args.device != "cpu":
        number_of_devices(args.device)
        return partial(device_halo.main, args)
    own_launches = {
        "compare": compare.main,
        "fused": fused.main,
        "gpu-report": gpu_report.main,
        "halo": halo.main,
        "import": _import,
    }
    if args.benchmark in own_launches:
        if detect().kind != "single":
            raise UsageError(
                f"{args.benchmark} starts its own processes, one after the other: run "
                f"it outside mpiexec"
            )
        return partial(own_launches[args.benchmark], args)
    if args.benchmark in ("parts", "leaks"):
        if detect().kind == "single":
            number_of_devices(args.device)
        main = device_parts.main if args.benchmark == "parts" else device_leaks.main
        return partial(main, args)
    if args.benchmark in TURNS:
        if getattr(args, "device", "cpu") != "cpu" and detect().kind == "single":
            number_of_devices(args.device)
        return partial(turns.main, args)
    if args.benchmark == "sparse":
        return partial(sparse.main, args)
    if args.benchmark == "spmm":
        return partial(spmm.main, args)
    if args.benchmark == "varying":
        return partial(varying.main, args)
    if args.benchmark == "compress":
        return partial(compression.main, args)
    launch = detect()
    ranks = _ranks(args, launch)
    if args.benchmark == "submit":
        mode, op = ("root_call", "bcast") if args.root_call else ("submit", args.op)
        _check_submit(args)
        in_place = args.device != "cpu" and bench_operation(op).in_place
        settings = {**_settings(args), "mode": mode, "in_place": in_place}
        settings["timing"] = "host"  # what a call costs its caller
        job = make_job(op, args.sizes, **settings)
        return partial(_submit, args, job, ranks)
    coll, jobs = _jobs(args, ranks)
    asked: str | None = getattr(args, "algorithm", None)
    env = {}
    if asked is not None:
        for count in ranks:
            chosen = resolve(asked, coll, count, launch, args.device)
            env[count] = {"COMMRT_ALGORITHM": f"{coll}:{chosen}"}
    return partial(_benchmark, args, coll, jobs, ranks, env)


def _ranks(args: argparse.Namespace, launch: LaunchInfo) -> list[int]:
    """Return the numbers of ranks to measure: asked for, or those that are there."""
    if launch.kind == "single":
        return args.ranks or [2]
    size = launch.size
    if size == 0:  # a PMIx launcher does not tell; MPI does
        size = int(library.load().COMM_WORLD.Get_size())
    if args.ranks not in (None, [size]):
        raise UsageError(
            f"--ranks {','.join(map(str, args.ranks))}: {launch.source} has started "
            f"{size}, and inside a launcher those are used; leave --ranks out, or run "
            f"this without the launcher"
        )
    return [size]


def _benchmark(
    args: argparse.Namespace,
    coll: str,
    jobs: list[dict[str, Any]],
    ranks: list[int],
    env: Mapping[int, dict[str, str]],
) -> int:
    wrong = False
    for results in _run(args, jobs, ranks, env):
        if not any(result["rows"] for result in results):
            raise UsageError(
                f"-m {args.message_size}: every size is below one {args.dtype} per rank"
            )
        print(_text(args, coll, jobs, results), end="", flush=True)
        wrong |= any(not row["valid"] for result in results for row in result["rows"])
    return 1 if wrong else 0


def _jobs(
    args: argparse.Namespace, ranks: Sequence[int]
) -> tuple[str, list[dict[str, Any]]]:
    """Return the operation and the jobs that a command line asks for."""
    sizes = osu_range(args.message_size, dtype_by_name(args.dtype).itemsize)
    settings = _settings(args)
    point_to_point = args.benchmark in POINT_TO_POINT
    on_device = args.device != "cpu"
    if args.format == "nccl" and (
        point_to_point or args.nonblocking or bench_operation(args.benchmark).is_empty
    ):
        raise UsageError(
            "--format nccl: nccl-tests has a layout for blocking collectives only, and "
            "no barrier; use osu or json"
        )
    if point_to_point:
        if min(ranks) < 2:
            raise UsageError(
                f"{args.benchmark} needs at least 2 ranks; run it with --ranks 2"
            )
        settings.update(mode=args.benchmark, window=args.window)
        # Not an operation of the table: the size is the message's, as in allreduce.
        return "allreduce", [make_job("allreduce", sizes, **settings)]
    spec = bench_operation(args.benchmark)
    _check_collective(args, spec, min(ranks))
    overlap = "device_overlap" if on_device else "nonblocking"
    settings.update(
        root=args.root_rank,
        mode=overlap if args.nonblocking else "blocking",
        num_tests=args.num_test_calls,
        symmetric=args.symmetric,
    )
    modes = [args.in_place]
    if args.format == "nccl" and spec.in_place and not args.in_place:
        modes = [False, True]
    return spec.name, [
        make_job(spec.name, sizes, in_place=in_place, **settings) for in_place in modes
    ]


def _check_collective(args: argparse.Namespace, spec: OpSpec, ranks: int) -> None:
    """Raise UsageError for options that mean nothing for this operation."""
    if spec is MULTI and args.algorithm is not None:
        raise UsageError(
            f"--algorithm {args.algorithm}: {spec.name} is messages, and has none"
        )
    if args.device != "cpu" and args.symmetric:
        raise UsageError(
            f"--symmetric: comm.empty gives arrays in host memory, which -d "
            f"{args.device} is not; leave one of them out"
        )
    if args.device != "cpu" and args.num_test_calls:
        raise UsageError(
            f"-t {args.num_test_calls}: with -d {args.device} the device computes, and "
            f"the host tests nothing meanwhile; leave it out"
        )
    if args.in_place and not spec.in_place:
        raise UsageError(
            f"--in-place: {spec.name} has no in-place form; run it without"
        )
    if args.root_rank and not spec.has_root:
        raise UsageError(
            f"-k {args.root_rank}: {spec.name} has no root; run it without"
        )
    if args.root_rank >= ranks:
        raise UsageError(
            f"-k {args.root_rank}: not a rank; the root is one of 0..{ranks - 1}"
        )
    if args.num_test_calls and not args.nonblocking:
        raise UsageError(
            f"-t {args.num_test_calls}: test() calls belong to --nonblocking; add it"
        )


def _check_submit(args: argparse.Namespace) -> None:
    if args.root_call and args.device != "cpu":
        raise UsageError(
            f"--root-call: a call on -d {args.device} waits for nobody in any case; "
            f"leave one of them out"
        )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that every kind of job has."""
    check_dtype(args.dtype)
    if args.device != "cpu" and detect().kind == "single":
        number_of_devices(args.device)  # or the launches would fail one by one
    return {
        "dtype": args.dtype,
        "device": args.device,
        "timing": args.timing,
        "iterations": args.iterations,
        "budget_s": args.budget_s,
        "pin": args.pin,
        **{key: vars(args)[key] for key in ("fresh", "warmup") if key in vars(args)},
    }


def _run(
    args: argparse.Namespace,
    jobs: list[dict[str, Any]],
    ranks: Sequence[int],
    env: Mapping[int, dict[str, str]],
) -> Iterator[list[dict[str, Any]]]:
    """Yield the jobs' results for each number of ranks; only rank 0 has any."""
    if detect().kind == "single":
        for count in ranks:
            yield [_launched(args, job, count, env.get(count, {})) for job in jobs]
        return
    os.environ.update(env.get(ranks[0], {}))
    results = [result for job in jobs if (result := worker.run(job)) is not None]
    if results:
        yield results


def _launched(
    args: argparse.Namespace, job: dict[str, Any], ranks: int, env: dict[str, str]
) -> dict[str, Any]:
    try:
        return launch(_SELF, ranks, job, timeout_s=args.timeout_s, env=env)
    except LaunchError as error:
        if error.refusal is not None:
            raise UsageError(f"on {ranks} ranks: {error.refusal}") from error
        raise


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
        mode="nonblocking" if job["mode"] == "device_overlap" else job["mode"],
        dtype=job["dtype"],
        device=job["device"],
        full=getattr(args, "full", False),
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
        f"{result['library']}, {result['ranks']} rank{'s' * (result['ranks'] > 1)}, "
        f"links {'/'.join(classes)}, "
        f"table {result['table_digest'][:12]}, inputs {inputs}{_place(job)}"
    )


def _place(job: Mapping[str, Any]) -> str:
    """Return where the arrays were, and whose clock it was, where that is special."""
    device, timing = job.get("device", "cpu"), job.get("timing", "events")
    if device == "cpu":
        return ""
    where = "a GPU" if device == "cuda" else "a device of threads"
    whose = "its events" if timing == "events" else "the host's clock"
    return f", arrays on {where}, by {whose}"


def _submit(args: argparse.Namespace, job: dict[str, Any], ranks: list[int]) -> int:
    what = (
        "bcast(...) at its root"
        if args.root_call
        else f"{args.op}(..., nonblocking=True)"
    )
    wrong = False
    for result, engine in _submitted(args, job, ranks):
        wrong |= any(not row["valid"] for row in result["rows"])
        if args.format == "json":
            by = {"engine": engine} if engine else {}
            print(_json(job, {**result, **by}), end="", flush=True)
            continue
        print(f"# {about(result, job)}")
        by_what = f" by {engine}" if engine else ""
        print(f"# caller time of {what}{by_what}, clock subtracted")
        for row in result["rows"]:
            print(formats.submit_line(row), flush=True)
    return 1 if wrong else 0


def _submitted(
    args: argparse.Namespace, job: dict[str, Any], ranks: list[int]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield results, and on a device by which engine; one that is not there is told.

    Ranks that somebody else has started have one engine, the one that is chosen.
    """
    if args.device == "cpu" or detect().kind != "single":
        for (result,) in _run(args, [job], ranks, {}):
            yield result, ""
        return
    for count in ranks:
        for engine in submit_engines(args.op, args.device):
            env = {}
            if engine.candidate:
                env = {"COMMRT_ALGORITHM": f"{args.op}:{engine.candidate}"}
            try:
                yield (
                    launch(
                        PeerSpec(engine.name, engine.kind, sys.executable),
                        *(count, job),
                        timeout_s=args.timeout_s,
                        env=env,
                    ),
                    engine.name,
                )
            except LaunchError as error:
                why = error.refusal or str(error)
                print(f"# not measured by {engine.name}: {why}", flush=True)


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
