# SPDX-License-Identifier: Apache-2.0
"""The schedule engine against loops written by hand for two ranks.

Both run in the same two processes, in alternation, without Python between calls, so the
ratio is what schedules cost. Beside them stands the bound of any exchange through
slots: each rank writes its vector to shared memory and reads the other's, and does
nothing with it. Needs g++; run it as

    mpiexec -n 2 python -m commrt.bench.handwritten [--bytes 8,8388608]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import commrt
from commrt.bench.machine import describe_machine
from commrt.bench.raw_data import write_output
from commrt.calls import arguments
from commrt.comm import Communicator, core_of
from commrt.errors import BackendError, UsageError
from commrt.job.arena import share
from commrt.vocabulary.operations import operation

__all__ = ["main"]

_SOURCE = Path(__file__).with_name("handwritten.cpp")
_TARGET_S = 2e-3
"""Length of one sample."""


def build() -> ctypes.CDLL:
    """Compile the hand-written loops with the flags of the engine and load them."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "handwritten.so"
        command = ["g++", "-std=c++17", "-O3", "-mavx2", "-shared", "-fPIC"]
        done = subprocess.run(
            [*command, str(_SOURCE), "-o", str(library)], capture_output=True, text=True
        )
        if done.returncode:
            raise BackendError(f"g++ cannot build {_SOURCE.name}: {done.stderr}")
        loaded = ctypes.CDLL(str(library))
    loaded.handwritten_region_nbytes.restype = ctypes.c_size_t
    loaded.handwritten_side.restype = ctypes.c_void_p
    return loaded


class Loops:
    """The hand-written loops, over shared memory of their own."""

    def __init__(self, comm: Communicator) -> None:
        self.library = build()
        nbytes = self.library.handwritten_region_nbytes()
        world = core_of(comm).world
        arena = share(world.bootstrap, [0, 1], "handwritten", nbytes, 60)
        if arena.region_nbytes != nbytes:
            raise BackendError("the hand-written region is not a multiple of a page")
        self.rank = comm.rank
        self.side = ctypes.c_void_p(
            self.library.handwritten_side(ctypes.c_void_p(arena.address), comm.rank)
        )

    def run(self, name: str, x: Any, y: Any, repetitions: int, chunk: int) -> None:
        """Run ``exchange``, ``direct`` or ``cross`` so often."""
        ends = ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data)
        sizes = ctypes.c_size_t(x.size), ctypes.c_size_t(chunk // 4)
        count = ctypes.c_int(repetitions)
        if name == "exchange":
            self.library.handwritten_exchange(self.side, *ends, *sizes, count)
        elif name == "cross":
            self.library.handwritten_cross(self.side, ends[0], *sizes, count)
        else:
            self.library.handwritten_direct(self.side, self.rank, *ends, *sizes, count)


_PAIRS: tuple[tuple[str, dict[str, int], str], ...] = (
    ("recursive_doubling", {}, "exchange"),
    ("direct", {"shots": 2}, "direct"),
)


def measure(comm: Communicator, nbytes: int, samples: int) -> list[dict[str, Any]]:
    """Return a row per algorithm: medians in µs and the ratio engine / by hand."""
    loops = Loops(comm)
    x = np.arange(nbytes // 4, dtype=np.float32)
    y = np.empty_like(x)
    rows = []
    for algorithm, params, loop in _PAIRS:
        plan = _plan(comm, x, y, algorithm, params)
        times: dict[str, list[float]] = {"engine": [], "hand": [], "cross": []}
        repetitions = _repetitions(comm, plan, x, y)
        for _ in range(samples + 1):
            comm.barrier()
            spent = core_of(comm).time_plan(
                plan, x.ctypes.data, y.ctypes.data, repetitions, 60
            )
            times["engine"].append(spent / repetitions * 1e6)
            _check(y, 2 * x, algorithm)
            comm.barrier()
            times["hand"].append(_by_hand(loops, loop, x, y, repetitions))
            _check(y, 2 * x, f"{loop} by hand")
            comm.barrier()
            times["cross"].append(_by_hand(loops, "cross", x, y, repetitions))
        engine, hand, cross = (statistics.median(times[k][1:]) for k in times)
        ratios = [a / b for a, b in zip(times["engine"], times["hand"], strict=True)]
        rows.append(
            {
                "algorithm": algorithm,
                "nbytes": nbytes,
                "engine_us": engine,
                "hand_us": hand,
                "cross_us": cross,
                "ratio": statistics.median(ratios[1:]),
                "samples": times,
            }
        )
    return rows


def _check(result: Any, expected: Any, who: str) -> None:
    """Raise unless the result is right; clear it for the next one."""
    if not np.array_equal(result, expected):
        raise BackendError(
            f"{who}: the result is wrong, so its time means nothing; nothing is "
            f"reported"
        )
    result[:] = 0


def _plan(comm: Communicator, x: Any, y: Any, name: str, params: dict[str, int]) -> Any:
    given = {"out": y, "algorithm": name, "params": params}
    call = arguments.parse(operation("allreduce"), (x,), given)
    return core_of(comm).host.plan(call, arguments.bind(call, comm.rank, comm.size))


def _repetitions(comm: Communicator, plan: Any, x: Any, y: Any) -> int:
    core_of(comm).time_plan(plan, x.ctypes.data, y.ctypes.data, 3, 60)
    once = core_of(comm).time_plan(plan, x.ctypes.data, y.ctypes.data, 10, 60) / 10
    mine = np.array([max(1.0, min(20000.0, _TARGET_S / once))])
    return int(comm.allreduce(mine, op="min")[0])


def _by_hand(loops: Loops, loop: str, x: Any, y: Any, repetitions: int) -> float:
    import time

    begin = time.perf_counter()
    loops.run(loop, x, y, repetitions, 131072)
    return (time.perf_counter() - begin) / repetitions * 1e6


def main(argv: list[str] | None = None) -> int:
    """Run on two ranks; rank 0 prints a table and, with --out, writes the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", default="8,8388608")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    comm = commrt.init()
    if comm.size != 2:
        print("run with two ranks: mpiexec -n 2 python -m commrt.bench.handwritten")
        return 2
    rows = []
    for text in args.bytes.split(","):
        rows += measure(comm, int(text), args.samples)
    if comm.rank == 0:
        print(f"link class {comm.facts.link_class}")
        print("| allreduce | bytes | engine µs | by hand µs | ratio | crossing µs |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            print(
                f"| {row['algorithm']} | {row['nbytes']} | {row['engine_us']:.3g} "
                f"| {row['hand_us']:.3g} | {row['ratio']:.2f} | {row['cross_us']:.3g} |"
            )
        if args.out:
            links = str(comm.facts.link_class)
            data = {"machine": describe_machine(), "link_class": links, "rows": rows}
            try:
                write_output(args.out, json.dumps(data))
            except UsageError as error:
                print(f"commrt.bench.handwritten: {error}", file=sys.stderr)
                return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
