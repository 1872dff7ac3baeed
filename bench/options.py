# SPDX-License-Identifier: Apache-2.0
"""Command lines of the benchmarks; names follow OSU's where OSU has the option."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

from commrt.bench.bench_operations import MEASURED
from commrt.bench.device_memory import DEVICES, TIMINGS
from commrt.bench.option_values import (
    argument,
    check_dtype,
    count,
    densities,
    doubling_sizes,
    dtype_name,
    names_among,
    osu_range,
    rank_list,
    seconds,
    size_list,
)
from commrt.bench.varying_calls import WAYS
from commrt.bench.varying_forms import FORMS
from commrt.errors import UsageError, suggest
from commrt.sparse.cost import ALGORITHMS
from commrt.sparse.result import FORMATS
from commrt.vocabulary.dtypes import DTYPES
from commrt.vocabulary.operations import OPERATIONS, operation, other_call

__all__ = [
    "POINT_TO_POINT",
    "TURNS",
    "build_parser",
    "check_dtype",
    "doubling_sizes",
    "osu_range",
    "parse",
    "size_list",
]

POINT_TO_POINT = ("latency", "bw", "bibw")
TURNS = {
    "neighbor_allgather": "A block to all neighbours in a grid, beside mpi4py's.",
    "neighbor_allgatherv": "The same with counts, beside mpi4py's.",
    "neighbor_alltoall": "A block to each neighbour in a grid, beside mpi4py's.",
    "neighbor_alltoallv": "The same with counts, beside mpi4py's.",
    "redistribute": "From rows to columns, beside mpi4py's Alltoallv and slices.",
    "topk_allreduce": "The largest elements of a sum, beside the dense allreduce.",
}

_MODES_DOC = {
    "latency": "Half a round trip between two ranks.",
    "bw": "Bandwidth of a window of nonblocking messages, one way.",
    "bibw": "Bandwidth of windows in both directions at once.",
}


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print and end the program with."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help)")

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            hint = suggest(extra[0], self._option_string_actions)
            raise UsageError(f"unknown argument {extra[0]!r}{hint}")
        return found, extra


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m commrt.bench``; it raises UsageError."""
    parser = _Parser(
        prog="python -m commrt.bench",
        description="Benchmarks with OSU's families, options and output. Outside "
        "mpiexec they start their own ranks; inside they use the ranks they are given.",
    )
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK")
    commands.required = True
    for spec in MEASURED:
        command = commands.add_parser(spec.name, help=spec.doc, description=spec.doc)
        _osu_options(command, "1048576")
        _collective_options(command)
    for name in POINT_TO_POINT:
        doc = _MODES_DOC[name]
        command = commands.add_parser(name, help=doc, description=doc)
        _osu_options(command, "4194304")
        command.add_argument(
            "-W", "--window", type=count(1), default=64, help="messages in flight (64)"
        )
    _add_turns(commands)
    _add_halo(commands)
    _add_fused(commands)
    _add_compare(commands)
    _add_submit(commands)
    _add_on_device(commands)
    _add_sparse(commands)
    _add_spmm(commands)
    _add_compress(commands)
    _add_varying(commands)
    _add_import(commands)
    _add_gpu_report(commands)
    return parser


def _osu_options(command: argparse.ArgumentParser, largest: str) -> None:
    command.add_argument(
        "-m",
        "--message-size",
        default=largest,
        metavar="[MIN:]MAX",
        help=f"message sizes in bytes, doubling (from one element to {largest})",
    )
    command.add_argument(
        *("-i", "--iterations"),
        type=count(1),
        default=1000,
        help="most repetitions per size",
    )
    command.add_argument(
        *("-x", "--warmup"),
        type=count(0),
        default=10,
        help="untimed calls before each size",
    )
    command.add_argument(
        "-c",
        "--validation",
        action="store_true",
        help="print the column Validation (results are checked in any case)",
    )
    command.add_argument(
        "-T",
        "--type",
        dest="dtype",
        type=argument(dtype_name),
        default="float32",
        metavar="DTYPE",
        help="float32, mpi_char, mpi_int, mpi_float, "
        + ", ".join(dtype.name for dtype in DTYPES),
    )
    _device_options(command)
    command.add_argument(
        "--fresh",
        action="store_true",
        help="rewrite the inputs between calls, as training does",
    )
    command.add_argument(
        "--ranks",
        type=argument(rank_list),
        help="ranks to start, as in 2,4 (2); inside mpiexec those there are",
    )
    command.add_argument("--format", choices=["osu", "nccl", "json"], default="osu")
    _budget_options(command, 1.0)


def _device_options(command: argparse.ArgumentParser) -> None:
    _device_option(command)
    command.add_argument(
        "--timing",
        choices=TIMINGS,
        default="events",
        help="whose clock times calls on a device: its events', or the host's (events)",
    )


def _device_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        *("-d", "--device"),
        choices=DEVICES,
        default="cpu",
        help="where the arrays lie; thread is a device of threads, for trying (cpu)",
    )


def _budget_options(command: argparse.ArgumentParser, budget_s: float) -> None:
    command.add_argument(
        "--budget-s",
        type=seconds,
        default=budget_s,
        help=f"most seconds of repetitions per size ({budget_s:g})",
    )
    command.add_argument(
        "--timeout-s", type=seconds, default=600.0, help="deadline of one launch (600)"
    )
    command.add_argument(
        "--no-pin",
        dest="pin",
        action="store_false",
        help="do not give each rank its share of the CPUs",
    )


def _collective_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-f", "--full", action="store_true", help="more columns")
    command.add_argument(
        "--nonblocking",
        action="store_true",
        help="submit, compute, wait: overlap of communication and computation",
    )
    command.add_argument(
        "-t",
        "--num-test-calls",
        type=count(0),
        default=0,
        help="test() calls during the computation (nonblocking)",
    )
    command.add_argument("-k", "--root-rank", type=count(0), default=0, help="root (0)")
    command.add_argument(
        "-l", "--in-place", action="store_true", help="one array for input and output"
    )
    command.add_argument(
        "--symmetric", action="store_true", help="arrays from comm.empty"
    )
    command.add_argument(
        "--algorithm",
        metavar="[BACKEND/]NAME",
        help="instead of the selected one, as in shm/ring{chunk=65536}",
    )


def _add_turns(commands: _Commands) -> None:
    for name, doc in TURNS.items():
        row = other_call(name)
        command = commands.add_parser(name, help=doc, description=doc)
        command.add_argument(
            *("-m", "--message-size"),
            default="65536:4194304" if row.takes_number else "1048576",
            metavar="[MIN:]MAX",
            help="bytes for one neighbour, of one rank's part, or of x; doubling",
        )
        command.add_argument(
            *("-i", "--iterations"), type=count(1), default=100, help="calls per size"
        )
        command.add_argument(
            "-T", "--type", dest="dtype", type=argument(dtype_name), default="float32"
        )
        if row.kind == "neighbors":
            command.add_argument(
                "--grid", help="ranks in each dimension, as in 2x2 (two, even)"
            )
            command.add_argument("--open", action="store_true", help="not periodic")
        _device_options(command)
        if row.takes_number:
            command.add_argument(
                "--density",
                type=argument(lambda text: densities(text)[0]),
                default=0.01,
                help="k as a part of the elements (0.01)",
            )
        command.add_argument("--ranks", type=argument(rank_list))
        command.add_argument("--timeout-s", type=seconds, default=600.0)
        command.add_argument("--format", choices=["osu", "json"], default="osu")


def _add_halo(commands: _Commands) -> None:
    doc = "Halo exchange of a block, beside mpi4py with numpy slices and a plain copy."
    command = commands.add_parser("halo", help=doc, description=doc)
    command.add_argument(
        "--shape", default="256x256x256", help="cells of a rank's block (256x256x256)"
    )
    command.add_argument(
        "--width", type=count(1), default=1, help="cells of the halo, each side (1)"
    )
    command.add_argument(
        "--grid", help="ranks in each dimension, as in 2x1x1 (as even as can be)"
    )
    command.add_argument("--faces", action="store_true", help="without corners")
    command.add_argument(
        "--direct", action="store_true", help="corners from the ranks that own them"
    )
    command.add_argument("--open", action="store_true", help="not periodic")
    command.add_argument(
        "--reduce", action="store_true", help="halo_reduce: add halos to their owners"
    )
    _device_options(command)
    command.add_argument(
        "--fresh", action="store_true", help="rewrite the fields between calls"
    )
    command.add_argument(
        "-T", "--type", dest="dtype", type=argument(dtype_name), default="float32"
    )
    command.add_argument("--ranks", type=argument(rank_list))
    command.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="an interpreter with mpi4py over another MPI",
    )
    command.add_argument(
        "-i", "--iterations", type=count(1), default=200, help="repetitions (200)"
    )
    command.add_argument("--format", choices=["osu", "json"], default="osu")
    command.add_argument(
        "--timeout-s", type=seconds, default=600.0, help="deadline of one launch (600)"
    )
    command.add_argument(
        "--no-pin", dest="pin", action="store_false", help="do not give each rank a CPU"
    )


def _add_fused(commands: _Commands) -> None:
    doc = "Many short allreduces, fused and not, beside one of the same bytes."
    command = commands.add_parser("fused", help=doc, description=doc)
    command.add_argument(
        "-n", "--number", type=count(1), default=1000, help="of allreduces (1000)"
    )
    command.add_argument(
        "-m",
        "--message-size",
        type=count(1),
        default=4096,
        help="bytes of each (4096)",
    )
    command.add_argument(
        "--bucket-size", type=count(1), help="bytes of a bucket (what is the default)"
    )
    command.add_argument(
        "--time-limit-s", type=seconds, help="of a bucket (none by default)"
    )
    command.add_argument(
        "--fresh", action="store_true", help="rewrite the arrays between calls"
    )
    command.add_argument(
        "-T", "--type", dest="dtype", type=argument(dtype_name), default="float32"
    )
    _device_option(command)
    command.add_argument("--ranks", type=argument(rank_list))
    command.add_argument(
        "-i", "--iterations", type=count(1), default=200, help="repetitions (200)"
    )
    command.add_argument("--format", choices=["osu", "json"], default="osu")
    command.add_argument(
        "--timeout-s", type=seconds, default=600.0, help="deadline of one launch (600)"
    )
    command.add_argument(
        "--no-pin", dest="pin", action="store_false", help="do not give each rank a CPU"
    )


def _add_compare(commands: _Commands) -> None:
    doc = "Compare commrt with other libraries, launch by launch, in alternation."
    command = commands.add_parser("compare", help=doc, description=doc)
    command.add_argument("--op", default="allreduce", help="operations, as in a,b")
    command.add_argument("--ranks", type=argument(rank_list), default=[2])
    command.add_argument(
        "--sizes", type=argument(size_list), default=size_list("8:134217728:4")
    )
    command.add_argument(
        "--launches", type=count(1), default=5, help="of each peer (5)"
    )
    command.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=[KIND:]PYTHON]",
        help="a further competitor: gloo, or symmetric (commrt with arrays from "
        "comm.empty), or copy (the bound), or NAME=PATH/python with mpi4py over "
        "another MPI, or NAME=KIND:PATH/python with KIND commrt, symmetric, mpi4py, "
        "gloo or copy; with -d cuda: nccl, torch_nccl, cupyx (all that are there)",
    )
    _device_options(command)
    command.add_argument("--fresh", action="store_true")
    command.add_argument("--in-place", action="store_true")
    command.add_argument(
        "--outstanding",
        type=count(0),
        default=0,
        metavar="N",
        help="a call is N nonblocking operations, each with its own arrays, and a "
        "wait for all of them (0: one blocking operation)",
    )
    command.add_argument("--dtype", type=argument(dtype_name), default="float32")
    command.add_argument("--iterations", type=count(1), default=1000)
    command.add_argument(
        "--markdown", action="store_true", help="tables in markdown (the default)"
    )
    command.add_argument("--out", metavar="FILE", help="raw data as JSON")
    command.add_argument(
        "--load", metavar="FILE", help="print the tables of earlier raw data; no runs"
    )
    _budget_options(command, 0.5)


def _add_submit(commands: _Commands) -> None:
    doc = "Caller time of a nonblocking call, without its wait."
    command = commands.add_parser("submit", help=doc, description=doc)
    command.add_argument("--op", default="allreduce")
    command.add_argument(
        "--root-call",
        action="store_true",
        help="a blocking broadcast at its root, which waits for nobody, instead: from "
        "the call to the store that others see, and back",
    )
    command.add_argument("--sizes", type=argument(size_list), default=[8])
    command.add_argument("--ranks", type=argument(rank_list))
    command.add_argument("--dtype", type=argument(dtype_name), default="float32")
    _device_options(command)
    command.add_argument("--iterations", type=count(1), default=2000)
    command.add_argument("--format", choices=["text", "json"], default="text")
    _budget_options(command, 1.0)


def _add_on_device(commands: _Commands) -> None:
    parts = "A staged call beside its measured parts: copies, flags, the host's call."
    leaks = "Many calls on a device, and what they leave behind."
    for name, doc in (("parts", parts), ("leaks", leaks)):
        command = commands.add_parser(name, help=doc, description=doc)
        command.add_argument(
            *("-d", "--device"), choices=DEVICES[1:], default="cuda", help="(cuda)"
        )
        command.add_argument("--ranks", type=argument(rank_list), help="(1)")
        if name == "parts":
            command.add_argument(
                *("-m", "--message-size"),
                type=count(8),
                default=256 << 20,
                help="bytes of the long call (268435456)",
            )
            command.add_argument("-i", "--iterations", type=count(1), default=30)
        else:
            command.add_argument(
                *("-n", "--number"), type=count(1), default=1_000_000, help="of calls"
            )
        command.add_argument("--timeout-s", type=seconds, default=3600.0)
        command.add_argument("--format", choices=["text", "json"], default="text")


def _add_sparse(commands: _Commands) -> None:
    doc = "Sparse allreduce against the dense one, by density and algorithm."
    command = commands.add_parser("sparse", help=doc, description=doc)
    command.add_argument(
        "--elements", type=count(1), default=1 << 24, help="of the vector (16777216)"
    )
    command.add_argument(
        "--densities",
        type=argument(densities),
        default=[0.001, 0.01, 0.1],
        metavar="LIST",
        help="of each rank's vector, as in 0.001,0.01",
    )
    command.add_argument(
        "--algorithm",
        dest="algorithms",
        action="append",
        choices=["auto", *ALGORITHMS],
        help="may be there several times (auto: the one that is chosen)",
    )
    command.add_argument("--result", choices=FORMATS, default="auto")
    _device_option(command)
    command.add_argument("--ranks", type=argument(rank_list))
    command.add_argument("--iterations", type=count(1), default=9)
    command.add_argument(
        "--kernels", action="store_true", help="the merge alone, on one core"
    )
    command.add_argument(
        "--warm",
        action="store_true",
        help="all calls of a kind in a row, with warm caches (else they take turns)",
    )
    command.add_argument("--timeout-s", type=seconds, default=600.0)
    command.add_argument("--format", choices=["text", "json"], default="text")


def _add_spmm(commands: _Commands) -> None:
    doc = "A sparse matrix times dense columns on one core, beside scipy and torch."
    command = commands.add_parser("spmm", help=doc, description=doc)
    for name, value, text in (
        ("--nodes", 100_000, "rows and columns of the matrix (100000)"),
        ("--degree", 10, "entries for each of them (10)"),
        ("--iterations", 15, "turns of each library (15)"),
    ):
        command.add_argument(name, type=count(1), default=value, help=text)
    command.add_argument(
        "--skew",
        type=float,
        default=0.0,
        help="node i has entries in proportion to i to the power of -SKEW (0: evenly)",
    )
    command.add_argument(
        "--widths",
        type=argument(size_list),
        default=[1, 7, 16, 64, 128, 256],
        metavar="LIST",
        help="columns of the dense matrix (1,7,16,64,128,256)",
    )
    command.add_argument(
        *("-T", "--type"),
        dest="dtypes",
        action="append",
        choices=["float32", "float64"],
        help="may be there twice (both)",
    )
    command.add_argument("--format", choices=["text", "json"], default="text")


def _add_compress(commands: _Commands) -> None:
    doc = "Compressed operations against plain ones, by size and wire format."
    command = commands.add_parser("compress", help=doc, description=doc)
    compressing = [one.name for one in OPERATIONS if one.compresses]
    command.add_argument(
        "--op",
        choices=[name for name in compressing if not operation(name).count_arguments],
        default="allreduce",
    )
    command.add_argument(
        "--sizes",
        type=argument(size_list),
        default=size_list("65536:67108864:4"),
        help="bytes of float32 (65536:67108864:4)",
    )
    _device_option(command)
    command.add_argument("--ranks", type=argument(rank_list))
    command.add_argument("--iterations", type=count(1), default=9)
    command.add_argument("--residual", action="store_true", help="with error feedback")
    command.add_argument(
        "--kernels", action="store_true", help="the kernels alone, on one core"
    )
    command.add_argument("--timeout-s", type=seconds, default=600.0)
    command.add_argument("--format", choices=["text", "json"], default="text")


def _add_varying(commands: _Commands) -> None:
    doc = "Calls of new lengths beside calls of seen ones, and other libraries'."
    command = commands.add_parser("varying", help=doc, description=doc)
    command.add_argument(
        "--op",
        dest="operations",
        type=names_among(FORMS),
        metavar="LIST",
        help="calls, with commas between them (all)",
    )
    command.add_argument(
        "--ways",
        type=names_among(WAYS),
        metavar="LIST",
        help=f"libraries that take turns ({','.join(WAYS)}, as far as installed)",
    )
    command.add_argument(
        *("-m", "--message-size"),
        default="4096:16384",
        metavar="MIN:MAX",
        help="bytes of a rank's block, between which lengths are drawn (4096:16384)",
    )
    command.add_argument(
        "--calls", type=count(1), default=16, help="calls of a turn (16)"
    )
    command.add_argument(
        *("-i", "--iterations"),
        type=count(1),
        default=25,
        help="turns of each library, for each operation (25)",
    )
    command.add_argument("--ranks", type=argument(rank_list))
    command.add_argument("--timeout-s", type=seconds, default=600.0)
    command.add_argument("--format", choices=["text", "json"], default="text")


def _add_import(commands: _Commands) -> None:
    doc = "Time of import commrt beyond import numpy, in fresh interpreters."
    command = commands.add_parser("import", help=doc, description=doc)
    command.add_argument(
        "--pairs", type=count(1), default=15, help="interpreter pairs (15)"
    )
    command.add_argument("--format", choices=["text", "json"], default="text")


def _add_gpu_report(commands: _Commands) -> None:
    doc = "All that is to be measured on a GPU, in one run, with a report."
    command = commands.add_parser("gpu-report", help=doc, description=doc)
    command.add_argument(
        *("-d", "--device"), choices=DEVICES[1:], default="cuda", help="(cuda)"
    )
    command.add_argument(
        "--out", metavar="FOLDER", help="of the report (gpu-report-DATE-TIME)"
    )
    command.add_argument(
        "--only", action="append", metavar="PART", help="may be there several times"
    )
    command.add_argument(
        "--quick", action="store_true", help="little of each: does everything run?"
    )
    command.add_argument(
        "--timeout-s", type=seconds, default=1200.0, help="of one part (1200)"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; UsageError for a malformed one."""
    return build_parser().parse_args(argv)
