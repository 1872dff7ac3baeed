# SPDX-License-Identifier: Apache-2.0
"""One launch of the halo benchmark: ``mpiexec -n N python halo_worker.py JOB``.

Run by path, in any interpreter with mpi4py and numpy. Three ways to fill the halo of
the same block take turns: commrt's, where the interpreter has it; mpi4py with numpy
slices, as people write it; and numpy copies of the same strided bytes within the own
block, which is the bound: nothing crosses between ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if __name__ == "__main__":
    # This folder must not shadow anything that the libraries import.
    del sys.path[0]


if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "copy_slices",
    "exchange_slices",
    "face_slices",
    "halo_nbytes",
    "measure",
    "reduce_slices",
]

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]
Faces = list[tuple[int, Any, Any, Any, Any]]


def face_slices(ndim: int, width: int, corners: bool) -> Faces:
    """Return, per dimension: it, first and last own cells, low and high halo."""
    own = slice(width, -width)
    found: Faces = []
    for dim in range(ndim):
        before: list[Any] = [slice(None) if corners else own] * dim
        behind: list[Any] = [own] * (ndim - dim - 1)

        def part(low: int, high: int | None, a: Any = before, b: Any = behind) -> Any:
            return (*a, slice(low, high), *b)

        found.append(
            (
                dim,
                part(width, 2 * width),
                part(-2 * width, -width),
                part(0, width),
                part(-width, None),
            )
        )
    return found


def exchange_slices(field: Array, cart: Any, faces: Faces) -> Call:
    """Return the exchange written with mpi4py and numpy slices."""

    def exchange() -> None:
        for dim, first, last, low, high in faces:
            below, above = cart.Shift(dim, 1)
            for part, dest, source, halo in (
                (last, above, below, low),
                (first, below, above, high),
            ):
                out = np.ascontiguousarray(field[part])
                come = np.empty_like(out)
                cart.Sendrecv(out, dest, 0, come, source, 0)
                if source >= 0:
                    field[halo] = come

    return exchange


def reduce_slices(field: Array, cart: Any, faces: Faces) -> Call:
    """Return the reverse, written so: halos go back and are added, last ones first."""

    def reduce() -> None:
        for dim, first, last, low, high in reversed(faces):
            below, above = cart.Shift(dim, 1)
            for part, dest, source, own in (
                (low, below, above, last),
                (high, above, below, first),
            ):
                out = np.ascontiguousarray(field[part])
                come = np.empty_like(out)
                cart.Sendrecv(out, dest, 0, come, source, 0)
                if source >= 0:
                    field[own] += come

    return reduce


def copy_slices(field: Array, faces: Faces) -> Call:
    """Return a call that copies as many bytes, as strided, within the block."""

    def copies() -> None:
        for _, first, last, low, high in faces:
            field[low] = field[last]
            field[high] = field[first]

    return copies


def halo_nbytes(field: Array, faces: Faces) -> int:
    """Return the bytes that one rank gets, with a neighbour on every side."""
    return sum(int(field[low].nbytes + field[high].nbytes) for *_, low, high in faces)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Measure on the ranks this process belongs to; return the result on rank 0."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    dims = job["grid"] or MPI.Compute_dims(world.size, len(job["shape"]))
    cart = world.Create_cart(dims, [job["periodic"]] * len(dims))
    rng = np.random.default_rng(world.rank)
    width = job["width"]
    block = rng.integers(0, 100, [n + 2 * width for n in job["shape"]])
    faces = face_slices(len(dims), width, job["corners"])
    fields = [block.astype(job["dtype"]) for _ in range(3)]
    by_hand = reduce_slices if job["reduce"] else exchange_slices
    calls = {
        "mpi4py": by_hand(fields[0], cart, faces),
        "copy": copy_slices(fields[1], faces),
    }
    about = {"library": MPI.Get_library_version().split(",")[0].strip()}
    if job["commrt"]:
        import commrt

        runtime: Any = commrt
        comm = runtime.init()
        grid = comm.cart(tuple(dims), job["periodic"])
        what = "halo_reduce" if job["reduce"] else "halo_exchange"
        calls["commrt"] = getattr(grid.plan, what)(
            fields[2], width, corners=job["corners"], direct=job["direct"]
        )
        about["version"] = commrt.__version__
        about["link_class"] = str(comm.facts.link_class)
    valid = True
    if "commrt" in calls:
        for name in ("mpi4py", "commrt"):
            calls[name]()
        # A reverse leaves undefined values in the halo.
        own = tuple(slice(width, -width) for _ in dims) if job["reduce"] else ...
        same = np.array_equal(fields[0][own], fields[2][own])
        valid = world.allreduce(same, op=MPI.LAND)
    samples = _samples(job, world, calls, fields)
    worst = {name: _worst(world, times) for name, times in samples.items()}
    if world.rank != 0:
        return None
    return {
        **about,
        "grid": list(dims),
        "ranks": world.size,
        "nbytes": halo_nbytes(fields[0], faces),
        "valid": bool(valid),
        "samples_us": worst,
    }


def _samples(
    job: Mapping[str, Any],
    world: MPI.Intracomm,
    calls: Mapping[str, Call],
    fields: list[Array],
) -> dict[str, list[float]]:
    """Time every call in turns, so that all of them meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds = max(1, job["iterations"] // 10)
    for turn in range(rounds + 1):
        for name, call in calls.items():
            for _ in range(min(10, job["iterations"])):
                if job["fresh"]:
                    for field in fields:
                        field += 0
                world.Barrier()
                start = time.perf_counter_ns()
                call()
                spent_us = (time.perf_counter_ns() - start) / 1000
                if turn:  # the first warms up
                    times[name].append(spent_us)
    return times


def _worst(world: MPI.Intracomm, times: list[float]) -> list[float]:
    """Return, for each repetition, the time of the slowest rank."""
    rows = world.allgather(times)
    return [round(max(each), 2) for each in zip(*rows, strict=True)]


def main(path: str) -> None:
    """Run the job in ``path``; rank 0 writes the result to where it says."""
    job = json.loads(Path(path).read_text())
    if job["pin"]:
        place = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or os.environ.get(
            "MPI_LOCALRANKID", "0"
        )
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[int(place) % len(cpus)]})
    result = measure(job)
    if result is not None:
        Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
