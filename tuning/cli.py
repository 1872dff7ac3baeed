# SPDX-License-Identifier: Apache-2.0
"""``commrt-tune``: run, show, explain, lint, compare; report, merge, export; fit and
simulate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from commrt.bench.device_memory import DEVICES, number_of_devices
from commrt.commands.console import until_reader_leaves
from commrt.errors import CommError, TableError, UsageError, suggest
from commrt.files.visible import visible, visible_lines
from commrt.launch.detect import detect
from commrt.select.facts import LINK_CLASSES, CommFacts, Query
from commrt.select.fingerprint import available_cores
from commrt.select.schema import DEFAULT_TIE_MARGIN
from commrt.select.schema import DEVICES as MEMORIES
from commrt.tuning import run
from commrt.tuning.agreement import agreements, overall
from commrt.tuning.decide import decide
from commrt.tuning.file_commands import add_commands, table_of
from commrt.tuning.fit_network import add_fit
from commrt.tuning.lint import lint
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.show import explain, show
from commrt.tuning.simulate import add_simulate
from commrt.tuning.summary import describe_group
from commrt.tuning.tuner import Options
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.limits import parse_seconds
from commrt.vocabulary.operations import COLLECTIVES, operation

__all__ = ["main", "make_parser"]

DEFAULT_OPS = "allreduce,bcast,allgather,reduce_scatter,alltoall"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        return until_reader_leaves(lambda: int(arguments.command(arguments)))
    except CommError as error:
        print(f"commrt-tune: {visible_lines(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("commrt-tune: interrupted; no table was written", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="commrt-tune",
        description="Measure this machine with real ranks; write and read the table "
        "that chooses algorithms.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="measure and write a table"))
    shown = commands.add_parser("show", help="print a table for people")
    explained = commands.add_parser("explain", help="what the table says about a call")
    linted = commands.add_parser("lint", help="check a table against guidelines")
    for sub, command in ((shown, _show), (explained, _explain), (linted, _lint)):
        sub.set_defaults(command=command)
        sub.add_argument(
            "--table", type=Path, help="file (default: the one in force here)"
        )
    compared = commands.add_parser("compare", help="do two runs choose alike?")
    compared.set_defaults(command=_compare)
    compared.add_argument("recordings", nargs=2, type=Path, metavar="RAW")
    add_commands(commands)
    add_fit(commands)
    add_simulate(commands)
    explained.add_argument("op", metavar="OPERATION")
    explained.add_argument("nbytes", type=_nbytes, metavar="BYTES")
    explained.add_argument("--ranks", type=_positive, default=2)
    explained.add_argument("--nodes", type=_positive, default=1)
    explained.add_argument(
        "--link-class",
        choices=LINK_CLASSES,
        help="default: near, or oversubscribed where ranks outnumber the cores here",
    )
    explained.add_argument("--dtype", type=_dtype, default="float32")
    explained.add_argument(
        "--device", choices=MEMORIES, default="host", help="kind of memory (host)"
    )
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_run)
    add = parser.add_argument
    add("--ranks", type=_ranks, help="as in 2,4 (default: 2, and all cores)")
    add("--budget", type=_seconds, default=60.0, metavar="S", help="seconds (60)")
    add(
        "--launches",
        type=_positive,
        default=3,
        metavar="N",
        help="per rank count, at least (3); more while the budget lasts",
    )
    add("--ops", type=_ops, default=_ops(DEFAULT_OPS), help=f"default: {DEFAULT_OPS}")
    add("--max-bytes", type=_nbytes, default=32 << 20, help="largest vector (32M)")
    add("--out", type=Path, metavar="FILE", help="default: the user's table folder")
    add(
        "--raw",
        type=Path,
        metavar="FILE",
        help="keep every repetition (.json, .json.gz)",
    )
    add("--dtype", type=_dtype, default="float32")
    add(
        *("-d", "--device"),
        choices=DEVICES,
        default="cpu",
        help="where the arrays lie; thread is a device of threads, for trying (cpu)",
    )
    add("--seed", type=int, default=1, help="of the order of measurement")
    add("--mpiexec", metavar="PATH", help="launcher (default: beside python, or PATH)")
    add("--hang", type=_seconds, default=30.0, metavar="S", help="silence allowed (30)")


def _run(arguments: argparse.Namespace) -> int:
    options = Options(
        ranks=arguments.ranks or _all_ranks(arguments.device),
        ops=arguments.ops,
        launches=arguments.launches,
        budget_s=arguments.budget,
        max_nbytes=arguments.max_bytes,
        dtype=arguments.dtype,
        device=arguments.device,
        seed=arguments.seed,
    )
    given = detect()
    if given.kind == "single":
        summary: str | None = run.launched(
            options,
            out=arguments.out,
            raw=arguments.raw,
            mpiexec=arguments.mpiexec,
            hang_s=arguments.hang,
        )
    elif arguments.ranks or arguments.mpiexec:
        raise UsageError(
            f"the ranks were started by {given.source}, so the tuner uses those: leave "
            f"--ranks and --mpiexec out"
        )
    else:
        summary = run.within(options, out=arguments.out, raw=arguments.raw)
    if summary:
        print(summary)
    return 0


def _all_ranks(device: str) -> tuple[int, ...]:
    """Return two, and as many as there are cores or GPUs."""
    most = number_of_devices(device) if device == "cuda" else available_cores()
    return tuple(sorted({2, max(2, most)}))


def _show(arguments: argparse.Namespace) -> int:
    print(visible_lines(show(table_of(arguments.table))))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    redop = "sum" if operation(arguments.op).reduces else None
    query = Query(
        arguments.op, arguments.nbytes, arguments.dtype, arguments.device, op=redop
    )
    ppn, cores = -(-arguments.ranks // arguments.nodes), available_cores()
    facts = CommFacts(
        size=arguments.ranks,
        nodes=arguments.nodes,
        ppn=ppn,
        cores=cores,
        link_class=arguments.link_class
        or ("near" if ppn <= cores else "oversubscribed"),
    )
    print(visible_lines(explain(table_of(arguments.table), query, facts)))
    return 0


def _lint(arguments: argparse.Namespace) -> int:
    findings = lint(table_of(arguments.table))
    for finding in findings:
        print(visible(str(finding)))
    print(f"{len(findings) or 'nothing'} found")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    first, second = (
        decide(load_recording(path), DEFAULT_TIE_MARGIN)
        for path in arguments.recordings
    )
    found = agreements(first, second)
    if not found:
        raise TableError(
            "the two runs have no operation, ranks and links in common; expected two "
            "recordings of the same --ranks on the same machine"
        )
    print(f"{'':<48}{'same':>7}{'tied':>7}{'other':>7}")
    for one in found:
        name = f"{one.op}, {describe_group(one.group)}"
        other = max(0.0, 1 - one.same - one.tied)
        print(f"{visible(name):<48}{one.same:>7.0%}{one.tied:>7.0%}{other:>7.0%}")
    print(f"same or tied over {overall(found):.1%} of the range")
    return 0


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _nbytes(text: str) -> int:
    """Parse a byte count with an optional K, M or G."""
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    digits = text[:-1] if shift else text
    if not digits.isdecimal() or len(digits) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a byte count: write 32M")
    return int(digits) << shift


def _ops(text: str) -> tuple[str, ...]:
    ops = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [op for op in ops if op not in COLLECTIVES]
    if unknown or not ops:
        hint = suggest(unknown[0] if unknown else "", COLLECTIVES)
        raise argparse.ArgumentTypeError(
            f"unknown operation {', '.join(unknown)}{hint}"
        )
    return ops


def _dtype(text: str) -> str:
    try:
        return dtype_by_name(text).name
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
