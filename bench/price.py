# SPDX-License-Identifier: Apache-2.0
"""The cost of one property of a call, compared with the same call without it.

    mpiexec -n 2 python -m commrt.bench.price counts --op gather,alltoall
    mpiexec -n 2 python -m commrt.bench.price types --op allreduce
    mpiexec -n 2 python -m commrt.bench.price slots --op bcast
    mpiexec -n 4 python -m commrt.bench.price order --op allreduce
    mpiexec -n 4 python -m commrt.bench.price algorithms --op allreduce \\
        --algorithm shm/ring --algorithm shm/direct
    mpiexec -n 2 python -m commrt.bench.price comparison --op allreduce,bcast
    mpiexec -n 2 python -m commrt.bench.price recorder --op allreduce,bcast --sizes 8
    mpiexec -n 2 python -m commrt.bench.price liveness --op allreduce,bcast --sizes 8

``counts``: the vector form with equal counts, the same tuples in every call, beside the
plain operation. ``types``: other element types beside float32, the same bytes.
``slots``: payloads that move on through shared memory beside ones that do not, whatever
this machine chose.
``order``: ``deterministic=True`` beside without. ``algorithms``: every one named after
the first beside the first. ``comparison``: the MPI library's own collective, which
ranks compare now and then, beside one that they do not. ``recorder`` and ``liveness``:
a communicator as it is, beside one that does not write down its calls, or that knows
no processes of its ranks. Both calls take turns in one launch.
With ``--out`` a launch is added to what the file holds; ``--load`` prints a file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.machine import describe_machine
from commrt.bench.options import check_dtype
from commrt.bench.paired_calls import time_pair
from commrt.bench.raw_data import check_output, damage_told, read_data, write_output
from commrt.bench.timing_loop import numpy_dtype
from commrt.comm import core_of
from commrt.errors import UsageError
from commrt.files.visible import visible_lines
from commrt.job.slot_window import window_nbytes
from commrt.select.facts import Candidate
from commrt.vocabulary.operations import OPERATIONS, OpSpec, operation

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["main", "measure"]

_WHAT = (
    *("counts", "types", "slots", "order", "algorithms"),
    *("comparison", "recorder", "liveness"),
)
_SCHEMA = "commrt-price/1"
_BESIDE = " beside "
_LIBRARY = "mpi/native"
_VECTOR_FORM = {str(spec.vector_of): spec for spec in OPERATIONS if spec.vector_of}
_MEASURED = tuple(s.name for s in OPERATIONS if not s.vector_of and not s.is_empty)
Call = Callable[[], Any]
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks that mpiexec started."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.load:
            with damage_told(Path(arguments.load)):
                text = _text(read_data(Path(arguments.load), _SCHEMA))
            print(visible_lines(text))
            return 0
        jobs = list(_jobs(arguments))
        if arguments.out:
            check_output(Path(arguments.out))  # before anything is measured
            _earlier(Path(arguments.out))
    except (UsageError, ValueError, OSError) as error:
        print(f"price: {error}", file=sys.stderr)
        return 2
    import commrt

    comm = commrt.init()
    rows = [measure(comm, *job, turns=arguments.turns) for job in jobs]
    if comm.rank == 0:
        found = _with_launch(arguments, {"ranks": comm.size, "rows": rows})
        print(_text(found))
        if arguments.out:
            try:
                write_output(Path(arguments.out), json.dumps(found))
            except UsageError as error:
                print(f"price: {error}", file=sys.stderr)
                return 2
    return 0


def measure(
    comm: Communicator, what: str, coll: str, detail: str, nbytes: int, *, turns: int
) -> Row:
    """Return one row; the same on every rank."""
    if what == "order":
        with (
            comm.dup(deterministic=False) as free,
            comm.dup(deterministic=True) as left,
        ):
            first, second = (_plan(each, coll, detail, nbytes) for each in (free, left))
            took = time_pair(comm, first, second, turns)
            detail = " or ".join(
                str(each.explain(coll, nbytes, dtype=detail).choice.candidate)
                for each in (free, left)
            )
    elif what == "slots":
        with comm.dup() as still, comm.dup() as moving:
            core_of(still).set_slot_window(0)
            core_of(moving).set_slot_window(window_nbytes())
            # The same arrays: where pages lie changes times by more than slots do.
            kind = numpy_dtype(detail)
            arrays = _arrays(comm, coll, kind, max(1, nbytes // kind.itemsize))
            first, second = (_plan_on(c, coll, *arrays) for c in (still, moving))
            took = time_pair(comm, first, second, turns)
    elif what == "comparison":
        with comm.dup() as unseen, comm.dup() as compared:
            core_of(unseen).compare_every = 0
            first, second = (
                _plan(each, coll, "float32", nbytes, algorithm=_LIBRARY)
                for each in (unseen, compared)
            )
            took = time_pair(comm, first, second, turns)
            detail = f"every {core_of(compared).compare_every} calls"
    elif what in ("recorder", "liveness"):
        with comm.dup() as without, comm.dup() as usual:
            if what == "recorder":
                core_of(without).keeps_records = False
            else:
                core_of(without).attach_liveness(None, [])
            first, second = (
                _plan(each, coll, "float32", nbytes) for each in (without, usual)
            )
            took = time_pair(comm, first, second, turns)
            detail = ""
    elif what == "types":
        first, second = (_plan(comm, coll, t, nbytes) for t in ("float32", detail))
        took = time_pair(comm, first, second, turns)
    elif what == "algorithms":
        first, second = (
            _plan(comm, coll, "float32", nbytes, algorithm=name)
            for name in detail.split(_BESIDE)
        )
        took = time_pair(comm, first, second, turns)
    else:
        first, second = _with_and_without_counts(comm, coll, detail, nbytes)
        took = time_pair(comm, first, second, turns)
    return {"op": coll, "detail": detail, "nbytes": nbytes, **asdict(took)}


def _plan(comm: Communicator, coll: str, dtype: str, nbytes: int, **more: Any) -> Call:
    """Return a persistent call: what Python does for each is the same for both."""
    kind = numpy_dtype(dtype)
    x, out = _arrays(comm, coll, kind, max(1, nbytes // kind.itemsize))
    return _plan_on(comm, coll, x, out, **more)


def _is_broadcast(spec: OpSpec) -> bool:
    """Return whether every rank passes the one array that the root's is copied to."""
    return spec.input_on == "root" and spec.in_place


def _plan_on(comm: Communicator, coll: str, x: Any, out: Any, **more: Any) -> Call:
    plan: Callable[..., Call] = getattr(comm.plan, coll)
    return (
        plan(x, **more) if _is_broadcast(operation(coll)) else plan(x, out=out, **more)
    )


def _with_and_without_counts(
    comm: Communicator, coll: str, dtype: str, nbytes: int
) -> tuple[Call, Call]:
    """Return both forms on the same arrays."""
    kind = numpy_dtype(dtype)
    block = max(1, nbytes // kind.itemsize)
    x, out = _arrays(comm, coll, kind, block)
    spec, counts = _VECTOR_FORM[coll], (block,) * comm.size
    plain, vector = getattr(comm, coll), getattr(comm, spec.name)
    # Written out, as programs do: partial() merges keywords anew in every call.
    if len(spec.count_arguments) == 2:
        return (
            lambda: plain(x, out=out),
            lambda: vector(x, send_counts=counts, recv_counts=counts, out=out),
        )
    return lambda: plain(x, out=out), lambda: vector(x, counts=counts, out=out)


def _arrays(
    comm: Communicator, coll: str, kind: np.dtype[Any], block: int
) -> tuple[Any | None, Any | None]:
    """Return this rank's x and out, where a rank's block has so many elements."""
    is_root = comm.rank == 0
    spec = operation(coll)
    parts = comm.size if spec.by_pair or spec.out_count == "div_size" else 1
    has_x = is_root or spec.input_on == "all" or _is_broadcast(spec)
    x = np.ones(block * parts, kind) if has_x else None
    parts = comm.size if spec.by_pair or spec.out_count == "times_size" else 1
    has_out = is_root or spec.output_on != "root"
    return x, np.zeros(block * parts, kind) if has_out else None


def _jobs(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    what = arguments.what
    if what is None:
        raise UsageError(f"say what: {', '.join(_WHAT)}; or --load FILE")
    known = tuple(_VECTOR_FORM) if what == "counts" else _MEASURED
    names = (arguments.op or ",".join(known)).split(",")
    for name in names:
        if operation(name).name not in known:
            raise UsageError(f"--op {name}: {what} takes {', '.join(known)}")
    sizes = [int(part) for part in arguments.sizes.split(",")]
    return ((what, *each) for each in product(names, _details(arguments), sizes))


def _details(arguments: argparse.Namespace) -> list[str]:
    """Return what the second call of each pair has."""
    if arguments.what == "algorithms":
        first, *others = map(str, map(Candidate.parse, arguments.algorithm or [""]))
        if not others:
            raise UsageError("--algorithm: name two or more")
        return [f"{first}{_BESIDE}{other}" for other in others]
    types = ["float16", "bfloat16"] if arguments.what == "types" else ["float32"]
    if arguments.types:
        types = arguments.types.split(",")
    for each in types:
        check_dtype(each)
    return types


def _with_launch(arguments: argparse.Namespace, launch: Mapping[str, Any]) -> Row:
    """Return all launches of the file and this one."""
    found: Row = {
        "schema": _SCHEMA,
        "command": f"python -m commrt.bench.price {arguments.what}",
        "what": arguments.what,
        "machine": describe_machine(),
        "launches": [],
    }
    if arguments.out:
        found = _earlier(Path(arguments.out)) or found
    return {**found, "launches": [*found["launches"], launch]}


def _earlier(path: Path) -> Row | None:
    """Return the launches that a file holds; None if there is no such file."""
    if not path.is_file():
        return None
    found = read_data(path, _SCHEMA)
    with damage_told(path):
        _text({**found, "launches": [*found["launches"]]})
    return found


def _text(found: Mapping[str, Any]) -> str:
    heads = {
        "counts": ("plain", "vector"),
        "types": ("float32", "this type"),
        "slots": ("the same slots", "moving"),
        "order": ("any order", "one order"),
        "algorithms": ("first", "second"),
        "comparison": ("not compared", "compared"),
        "recorder": ("not recorded", "recorded"),
        "liveness": ("not watched", "watched"),
    }
    first, second = heads[found["what"]]
    lines = [
        f"| links | ranks | operation | | bytes | {first}, µs | {second}, µs | ratio "
        f"(lowest, highest launch) | launches |",
        "|---|---:|---|---|---:|---:|---:|---|---:|",
    ]
    for key, cells in _by_cell(found["launches"]).items():
        us = [statistics.median(c[w] for c in cells) for w in ("first_us", "second_us")]
        ratios = [cell["ratio"] for cell in cells]
        link, ranks, coll, detail, nbytes = key
        lines.append(
            f"| {link} | {ranks} | {coll} | {detail} | {nbytes} | {us[0]:.2f} | "
            f"{us[1]:.2f} | {statistics.median(ratios):.3f} ({min(ratios):.3f}, "
            f"{max(ratios):.3f}) | {len(cells)} |"
        )
    return "\n".join([*lines, "", *_means(_by_cell(found["launches"]))])


def _by_cell(launches: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Row]]:
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for launch in launches:
        for row in launch["rows"]:
            if row["link_class"] != "mixed":
                key = (row["link_class"], launch["ranks"], row["op"], row["detail"])
                cells.setdefault((*key, row["nbytes"]), []).append(row)
    return dict(sorted(cells.items()))


def _means(cells: Mapping[tuple[Any, ...], Sequence[Row]]) -> Iterator[str]:
    """Yield the geometric mean over sizes of the medians over launches."""
    sizes: dict[tuple[Any, ...], list[float]] = {}
    for key, rows in cells.items():
        median = statistics.median(row["ratio"] for row in rows)
        sizes.setdefault(key[:-1], []).append(median)
    for (link, ranks, coll, detail), ratios in sizes.items():
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        yield (
            f"{coll}, {detail}, {ranks} ranks, {link}: geometric mean over "
            f"{len(ratios)} sizes {mean:.3f}, largest {max(ratios):.2f}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt.bench.price",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=_WHAT)
    parser.add_argument("--op", help="operations, comma separated (those that can)")
    parser.add_argument("--types", help="element types, comma separated")
    parser.add_argument(
        "--algorithm",
        action="append",
        metavar="BACKEND/NAME",
        help="for algorithms: the first is what the others stand beside",
    )
    parser.add_argument(
        "--sizes",
        default="8,128,2048,8192,32768,131072,524288,2097152,8388608",
        help="bytes of a rank's block, of the whole vector where there are no blocks",
    )
    parser.add_argument("--turns", type=int, default=40, help="of each (40)")
    parser.add_argument("--out", help="file of raw data to add this launch to")
    parser.add_argument("--load", help="print what a file holds; no runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
