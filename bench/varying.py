# SPDX-License-Identifier: Apache-2.0
"""Calls of lengths that never came before, beside calls of lengths that did.

Sequences, routed tokens and last batches give a program new lengths in every step. A
turn is some calls of lengths that are all new, and then calls of the same lengths once
more. commrt called directly, commrt under torch, mpi4py and gloo take turns in one
launch. A turn's time is that of the slowest rank. Each result is compared with the
operation's definition before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.launch import torch_is_installed
from commrt.bench.own_ranks import report, tell
from commrt.bench.varying_calls import WAYS, Library, Mpi4py, Own, Torch
from commrt.bench.varying_forms import FORMS, works_in_place
from commrt.bench.varying_lengths import (
    DTYPE,
    Arrays,
    Lengths,
    drawn,
    expected,
    filled,
)
from commrt.errors import UsageError

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["main", "measure", "measure_on", "text"]

_BESIDE = {"commrt": "mpi4py", "torch": "gloo"}
"""The library that each of commrt's ways is compared with."""
_GLOO_LACKS = ("allgatherv", "alltoall of a list")
"""Forms that gloo refuses: lists of different lengths, and all_to_all of lists."""
Row = dict[str, Any]


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where a result was wrong."""
    job = {
        "operations": args.operations or list(FORMS),
        "elements": _elements(args),
        "calls": args.calls,
        "blocks": args.iterations,
        "ways": args.ways or _ways_here(),
    }
    if {"torch", "gloo"} & {*job["ways"]} and not torch_is_installed():
        raise UsageError("--ways: torch is not installed in this interpreter")
    return report(args, job, "commrt.bench.varying", measure, text)


def _ways_here() -> list[str]:
    """Return the ways that this interpreter has the packages for."""
    return [way for way in WAYS if way not in ("torch", "gloo") or torch_is_installed()]


def _elements(args: argparse.Namespace) -> tuple[int, int]:
    """Return the least and the most elements of a block."""
    text = args.message_size
    low, _, high = text.partition(":")
    try:
        least, most = (int(one) // DTYPE.itemsize for one in (low, high))
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise UsageError(
            f"-m {text}: write the least and the most bytes of a block of float32, as "
            f"in 4096:16384"
        )
    needed = 1 + args.calls * (1 + args.iterations)
    if most - least + 1 < needed:
        raise UsageError(
            f"-m {text}: blocks have {most - least + 1} lengths there, and {needed} "
            f"are needed: take a wider range, or fewer calls or blocks"
        )
    return least, most


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; the result is rank 0's."""
    import commrt

    runtime: Any = commrt
    comm = runtime.init()
    versions = {"commrt": commrt.__version__, "numpy": np.__version__}
    with ExitStack() as stack:
        libraries = _libraries(comm, job["ways"], versions, stack)
        rows = measure_on(comm, libraries, job)
    about = {
        "versions": versions,
        "ranks": comm.size,
        "nodes": comm.facts.nodes,
        "link_class": str(comm.facts.link_class),
        "library": comm.mpi_library,
    }
    return {**about, "rows": rows} if comm.rank == 0 else None


def _libraries(
    comm: Communicator,
    ways: Sequence[str],
    versions: dict[str, str],
    stack: ExitStack,
) -> dict[str, Library]:
    """Return the libraries that are here, and note their versions."""
    found: dict[str, Library] = {}
    if "commrt" in ways:
        found["commrt"] = Own(comm)
    if "torch" in ways or "gloo" in ways:
        import torch
        import torch.distributed as dist

        versions["torch"] = str(torch.__version__)
        torch.set_num_threads(1)  # as torchrun does
        dist.init_process_group("commrt")
        stack.callback(dist.destroy_process_group)
        if "torch" in ways:
            found["torch"] = Torch(dist.group.WORLD)
        if "gloo" in ways:
            found["gloo"] = Torch(dist.new_group(backend="gloo"), _GLOO_LACKS)
    if "mpi4py" in ways and comm.mpi is not None:
        found["mpi4py"] = Mpi4py(comm.mpi)
        versions["mpi4py"] = sys.modules["mpi4py"].__version__
    return found


def measure_on(
    comm: Communicator, libraries: Mapping[str, Library], job: Mapping[str, Any]
) -> list[Row]:
    """Return a row for each operation that any of the libraries has; collective."""
    rows = (_row(comm, libraries, job, name) for name in job["operations"])
    return [row for row in rows if row is not None]


def _row(
    comm: Communicator,
    libraries: Mapping[str, Library],
    job: Mapping[str, Any],
    name: str,
) -> Row | None:
    """Return the times of one operation; None where none of the libraries has it."""
    low, high = job["elements"]
    lengths = drawn(FORMS[name], comm.size, (low, high), random.Random(name))
    arrays = Arrays(comm.rank, comm.size, high)
    first = next(lengths)
    here = {
        way: library
        for way, library in libraries.items()
        if library.bind(name, first, *arrays.of(FORMS[name], first)) is not None
    }
    if not here:
        return None
    right = [_is_right(comm, each, name, first, arrays) for each in here.values()]
    samples: dict[str, dict[str, list[float]]] = {
        way: {"new": [], "seen": []} for way in here
    }
    known = [first]
    for block in range(1 + job["blocks"]):
        ways = list(here)
        new = [next(lengths) for _ in range(job["calls"])]
        for way in ways[block % len(ways) :] + ways[: block % len(ways)]:
            # Other libraries emptied the caches meanwhile: known calls come first.
            for which, each in (("", known), ("new", new), ("seen", new)):
                calls = [_bound(here[way], name, one, arrays) for one in each]
                took = _timed(comm, calls)
                if which and block:  # the first block warms up, too
                    samples[way][which].append(took)
        known = new
    slowest = {
        way: {which: _slowest(comm, times) for which, times in each.items()}
        for way, each in samples.items()
    }
    return {"op": name, "valid": all(right), "samples_us": slowest}


def _slowest(comm: Communicator, times: Sequence[float]) -> list[float]:
    """Return the times of the slowest rank."""
    found: list[float] = comm.allreduce(np.array(times), op="max").round(3).tolist()
    return found


def _bound(
    library: Library, name: str, lengths: Lengths, arrays: Arrays
) -> Callable[[], Any]:
    call = library.bind(name, lengths, *arrays.of(FORMS[name], lengths))
    assert call is not None
    return call


def _timed(comm: Communicator, calls: Sequence[Callable[[], Any]]) -> float:
    """Return the µs of one of the calls, made one after the other."""
    comm.barrier()
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls) * 1e6


def _is_right(
    comm: Communicator,
    library: Library,
    name: str,
    lengths: Lengths,
    arrays: Arrays,
) -> bool:
    """Return whether a call gives every rank what the operation is defined to."""
    spec = FORMS[name]
    x, out = arrays.of(spec, lengths)
    x[:] = filled(x.size, comm.rank)
    out[:] = 0
    _bound(library, name, lengths, arrays)()
    want = expected(spec, lengths, comm.rank)
    got = x if works_in_place(spec) else out
    agrees = np.array([want is None or np.array_equal(got, want)])
    comm.allreduce(agrees, op="land")
    return bool(agrees[0])


def text(job: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return a table: for each operation and way what calls take, new and seen."""
    low, high = job["elements"]
    versions = ", ".join(f"{name} {one}" for name, one in found["versions"].items())
    lines = [
        f"# {versions}, {found['ranks']} ranks on {found['nodes']} node(s), links "
        f"{found['link_class']}, {found['library']}",
        f"# {low} to {high} elements of float32 for a rank; us for a call: medians of "
        f"{job['blocks']} turns of {job['calls']} calls, and their shortest turns",
        f"{'operation':<26}{'library':<8}{'seen':>9}{'new':>9}{'more':>9}{'ratio':>7}"
        f"{'least:':>8}{'seen':>9}{'new':>9}{'more':>9}{'ratio':>7}  beside",
    ]
    for row in found["rows"]:
        lines += _lines(row)
    return "\n".join(lines)


def _lines(row: Row) -> Iterator[str]:
    least_us = {way: min(each["new"]) for way, each in row["samples_us"].items()}
    for way, each in row["samples_us"].items():
        pairs = [*zip(each["new"], each["seen"], strict=True)]
        more = median(new - seen for new, seen in pairs)
        ratio = median(new / seen for new, seen in pairs)
        new, seen = least_us[way], min(each["seen"])
        line = (
            f"{row['op']:<26}{way:<8}{median(each['seen']):>9.2f}"
            f"{median(each['new']):>9.2f}{more:>9.2f}{ratio:>7.2f}{'':>8}"
            f"{seen:>9.2f}{new:>9.2f}{new - seen:>9.2f}{new / seen:>7.2f}"
        )
        beside = least_us.get(_BESIDE.get(way, ""))
        if beside is not None:
            line += f"  {new / beside:.3f} of {_BESIDE[way]}"
        yield line if row["valid"] else f"{line}  WRONG"


if __name__ == "__main__":
    _found = measure(json.loads(sys.argv[1]))
    if _found is not None:
        tell(_found)
