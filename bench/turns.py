# SPDX-License-Identifier: Apache-2.0
"""Operations that the table of collectives does not have, each beside another way.

Neighbour collectives and redistribution beside mpi4py's, where the ranks are MPI's;
topk_allreduce beside the dense allreduce. The ways take turns within one launch. Each
result is compared with its definition before anything is timed; a call is timed by
itself, after a barrier, and its time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.bench.device_memory import memory_for, placed, seen
from commrt.bench.halo import extents
from commrt.bench.options import check_dtype, osu_range
from commrt.bench.own_ranks import report, tell
from commrt.bench.timing_loop import HostMemory, Memory
from commrt.boxes.layouts import Block, Layout
from commrt.errors import UsageError
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import CallSpec, other_call

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["Ways", "main", "measure", "text", "ways"]

Call = Callable[[], Any]
_TURN = 10


@dataclass(frozen=True)
class Ways:
    """One size of an operation."""

    calls: dict[str, Call]
    """By name; commrt's is the first."""
    is_right: Callable[[], bool]
    """True if commrt's call gave this rank what the operation is defined to."""


def main(args: argparse.Namespace) -> int:
    """Run a command line; return 0, or 1 where a result was wrong."""
    check_dtype(args.dtype)
    item = dtype_by_name(args.dtype).itemsize
    grid = None
    if getattr(args, "grid", None) is not None:
        grid = extents("--grid", args.grid)
        for ranks in args.ranks or [2]:
            if math.prod(grid) != ranks:
                raise UsageError(
                    f"--grid {args.grid}: has {math.prod(grid)} places, expected "
                    f"{ranks}, one for each rank"
                )
    job = {
        "operation": args.benchmark,
        "sizes": osu_range(args.message_size, item),
        "dtype": args.dtype,
        "grid": grid,
        "periodic": not getattr(args, "open", False),
        "density": getattr(args, "density", 0.0),
        "iterations": args.iterations,
        "device": getattr(args, "device", "cpu"),
        "timing": getattr(args, "timing", "events"),
    }
    return report(args, job, "commrt.bench.turns", measure, text)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the job on the ranks this process belongs to; the result is rank 0's."""
    import commrt

    runtime: Any = commrt
    comm = runtime.init()
    memory = memory_for(comm, job["device"], job["timing"])
    rows = []
    for nbytes in job["sizes"]:
        found = ways(comm, job, nbytes, memory)
        next(iter(found.calls.values()))()
        right = np.array([found.is_right()])
        comm.allreduce(right, op="land")
        samples = _samples(comm, found.calls, int(job["iterations"]), memory)
        rows.append({"size": nbytes, "valid": bool(right[0]), "samples_us": samples})
    about = {
        "version": commrt.__version__,
        "ranks": comm.size,
        "nodes": comm.facts.nodes,
        "link_class": str(comm.facts.link_class),
        "library": comm.mpi_library,
    }
    return {**about, "rows": rows} if comm.rank == 0 else None


def _samples(
    comm: Communicator, calls: Mapping[str, Call], iterations: int, memory: Memory
) -> dict[str, list[float]]:
    """Time every call in turns, so that all of them meet the same machine."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + max(1, iterations // _TURN)):
        for name, call in calls.items():
            for _ in range(min(_TURN, iterations)):
                comm.barrier()
                took = memory.timed(call, 1)
                if turn:  # the first warms up
                    spent[name].append(took)
    return {
        name: comm.allreduce(np.array(times), op="max").round(2).tolist()
        for name, times in spent.items()
    }


def ways(
    comm: Communicator,
    job: Mapping[str, Any],
    nbytes: int,
    memory: Memory | None = None,
) -> Ways:
    """Return the ways to do an operation on about so many bytes.

    Where the arrays lie in the ``memory`` of a device, only commrt's own.
    """
    memory = HostMemory() if memory is None else memory
    kind = np.dtype(dtype_by_name(job["dtype"]).name)
    count = max(1, nbytes // kind.itemsize)
    row = other_call(job["operation"])
    if row.kind == "neighbors":
        return _neighbors(comm, job, kind, count, memory)
    if row.takes_number:
        return _topk(comm, kind, count, job["density"], memory)
    return _redistribution(comm, kind, count, memory)


def _neighbors(
    comm: Communicator,
    job: Mapping[str, Any],
    kind: np.dtype[Any],
    count: int,
    memory: Memory,
) -> Ways:
    row = other_call(job["operation"])
    dims = tuple(job["grid"] or (0, 0))
    cart = comm.cart(dims, job["periodic"])
    number = len(cart.neighbors)
    blocks = 1 if row.sends_whole else number

    def sent_by(rank: int) -> Any:
        each = (rank * blocks + np.arange(blocks)) % 100 + 1
        return np.repeat(each, count).astype(kind)

    x = placed(memory, sent_by(comm.rank))
    out = placed(memory, np.zeros(number * count, kind))
    more = {name: [count] * number for name in row.count_arguments}
    want = np.zeros(number * count, kind)
    for at, source in enumerate(cart.neighbors):
        if source is not None:
            block = 0 if row.sends_whole else at ^ 1
            theirs = sent_by(source)[block * count : (block + 1) * count]
            want[at * count : (at + 1) * count] = theirs
    calls = {"commrt": getattr(cart.plan, row.name)(x, out=out, **more)}
    if comm.mpi is not None and isinstance(memory, HostMemory):
        calls["mpi4py"] = _mpi_neighbors(comm.mpi, cart, row, x, np.zeros_like(out))
    return Ways(calls, lambda: np.array_equal(seen(memory, out), want))


def _mpi_neighbors(mpi: Any, cart: Any, row: CallSpec, x: Any, out: Any) -> Call:
    there = mpi.Create_cart(cart.dims, cart.periodic)
    # As bytes: MPI does not know all types.
    sends, receives = x.view(np.uint8), out.view(np.uint8)
    each = receives.size // len(cart.neighbors)
    places = [at * each for at in range(len(cart.neighbors))]
    counts = [each] * len(places)
    call = getattr(there, row.name.capitalize())
    if row.count_arguments:
        receives = [receives, (counts, places), _byte()]
        if not row.sends_whole:
            sends = [sends, (counts, places), _byte()]
    return lambda: call(sends, receives)


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE


def _redistribution(
    comm: Communicator, kind: np.dtype[Any], count: int, memory: Memory
) -> Ways:
    """Return ways to move a square from whole rows to whole columns."""
    size, me = comm.size, comm.rank
    side = max(1, math.isqrt(count * size))
    rows = Layout((side, side), (size,), (Block(0), None))
    columns = Layout((side, side), (size,), (None, Block(0)))
    bounds = [side * rank // size for rank in range(size + 1)]
    ranges = list(pairwise(bounds))
    whole = np.arange(side * side).reshape(side, side) % 100
    part = np.ascontiguousarray(whole[slice(*ranges[me])].astype(kind))
    want = whole[:, slice(*ranges[me])].astype(kind)
    mine = placed(memory, part)
    out = placed(memory, np.zeros_like(want, order="C"))
    calls: dict[str, Call] = {
        "commrt": comm.plan.redistribute(mine, rows, columns, out=out)
    }
    if comm.mpi is not None and isinstance(memory, HostMemory):
        calls["mpi4py"] = _mpi_turned(comm.mpi, mine, np.zeros_like(out), ranges)
    return Ways(calls, lambda: np.array_equal(seen(memory, out), want))


def _mpi_turned(mpi: Any, mine: Any, out: Any, ranges: list[tuple[int, int]]) -> Call:
    """Return it as people write it: parts by slices, and one Alltoallv."""
    item = mine.itemsize
    sends = [len(mine) * (last - first) * item for first, last in ranges]
    receives = [(last - first) * out.shape[1] * item for first, last in ranges]

    def places(counts: list[int]) -> list[int]:
        return [0, *np.cumsum(counts[:-1]).tolist()]

    def turn() -> None:
        parts = [mine[:, first:last].ravel() for first, last in ranges]
        packed, come = np.concatenate(parts), np.empty(out.size, out.dtype)
        mpi.Alltoallv(
            [packed.view(np.uint8), (sends, places(sends)), _byte()],
            [come.view(np.uint8), (receives, places(receives)), _byte()],
        )
        out[...] = come.reshape(out.shape)  # blocks of rows, one after the other

    return turn


def _topk(
    comm: Communicator, kind: np.dtype[Any], count: int, density: float, memory: Memory
) -> Ways:
    """Whole numbers, so that what was sent and what is owed add up exactly."""
    rng = np.random.default_rng(comm.rank)
    mine = rng.integers(-9, 10, count).astype(kind)
    nothing, result = np.zeros_like(mine), np.zeros_like(mine)
    x = placed(memory, mine)
    total, residual = (placed(memory, nothing.copy()) for _ in range(2))
    k = max(1, round(density * count))

    def largest() -> None:
        memory.write(residual, 0, nothing)
        found = comm.topk_allreduce(x, k, residual=residual)
        result.fill(0)
        result[seen(memory, found.indices)] = seen(memory, found.values)

    def is_right() -> bool:
        whole = comm.allreduce(mine.copy())
        owed = comm.allreduce(np.array(seen(memory, residual)))
        return np.array_equal(result + owed, whole)

    def run() -> Any:
        return comm.topk_allreduce(x, k, residual=residual)

    # The timed calls go on with their residual, as training does.
    turns = iter([largest])
    return Ways(
        {
            "commrt": lambda: next(turns, run)(),
            "dense allreduce": lambda: comm.allreduce(x, out=total),
        },
        is_right,
    )


def text(job: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return a table in OSU's manner: one line per size."""
    names = list(found["rows"][0]["samples_us"])
    about, row = "", other_call(job["operation"])
    if row.kind == "neighbors":
        grid = "x".join(map(str, job["grid"])) if job["grid"] else "even"
        about = f", {grid} grid, {'periodic' if job['periodic'] else 'open ends'}"
    elif row.takes_number:
        about = f", k is {job['density']:g} of the elements"
    if job.get("device", "cpu") != "cpu":
        about += f", arrays on a device ({job['device']}), by {job['timing']}"
    lines = [
        f"# commrt {found['version']}, {job['operation']}, {found['ranks']} ranks on "
        f"{found['nodes']} node(s), links {found['link_class']}, {job['dtype']}{about}",
        f"# {'Size':<10}"
        + "".join(f"{name + '(us)':>22}{'Min(us)':>12}" for name in names)
        + f"{'commrt is':>12}" * (len(names) > 1),
    ]
    for row in found["rows"]:
        samples = row["samples_us"]
        medians = [statistics.median(samples[name]) for name in names]
        line = f"{row['size']:<12}" + "".join(
            f"{median:>22.2f}{min(samples[name]):>12.2f}"
            for name, median in zip(names, medians, strict=True)
        )
        if len(names) > 1:
            line += f"{medians[0] / medians[1]:>12.2f}"
        lines.append(line + ("" if row["valid"] else "  WRONG"))
    return "\n".join(lines)


if __name__ == "__main__":
    _found = measure(json.loads(sys.argv[1]))
    if _found is not None:
        tell(_found)
