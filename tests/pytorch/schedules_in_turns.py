# SPDX-License-Identifier: Apache-2.0
"""Times of one operation by several algorithms that take turns, on ranks of a launcher.

    ... schedules_in_turns.py reduce_scatter 1048576 auto bine direct ring

An algorithm may have a backend and parameters: ``gloo/native``, ``bine{form=scatter}``.
``all`` stands for ``auto`` and whatever can run there, each program once. Then a last
line says how many times the best one's time ``auto`` takes.
Rank 0 prints, for each, the median time of the slowest rank, and the processor time
that all ranks took together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch.distributed  # noqa: F401 - with it, gloo's own collectives are candidates

import commrt
from commrt.vocabulary.operations import operation

LONG_NBYTES, FEW_TIMES, MANY_TIMES = 1 << 16, 6, 24
"""Calls of each algorithm that are timed, from so many bytes on, and below."""


def wish(text: str) -> dict[str, Any]:
    """Return the arguments of a call that names an algorithm."""
    if text == "auto":
        return {}
    name, _, rest = text.rstrip("}").partition("{")
    backend, _, algorithm = name.rpartition("/")
    pairs = dict(one.split("=") for one in rest.split(",") if one)
    params = {
        key: int(value) if value.isdigit() else value for key, value in pairs.items()
    }
    found: dict[str, Any] = {"algorithm": algorithm, "params": params or None}
    return {**found, "backend": backend} if backend else found


def took_ms(comm: Any, call: Callable[[], Any]) -> tuple[float, float]:
    """Return the time of the slowest rank, and the processors' time of all ranks.

    Of a second call: a link that rested lets the first few kilobytes pass at once.
    """
    call()
    comm.barrier()
    busy, start = time.process_time(), time.perf_counter()
    call()
    slowest = np.array([time.perf_counter() - start])
    all_ranks = np.array([time.process_time() - busy])
    comm.allreduce(slowest, op="max")
    comm.allreduce(all_ranks)
    return float(slowest[0]) * 1e3, float(all_ranks[0]) * 1e3


def main() -> None:
    """Print a line for each algorithm."""
    coll, nbytes, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    comm = commrt.init()
    if names == ["all"]:
        offered = comm.candidates(coll, nbytes, distinct=True)
        names = ["auto", *map(str, offered)]
    turns = FEW_TIMES if nbytes >= LONG_NBYTES else MANY_TIMES
    x = np.ones(nbytes // 4 // comm.size * comm.size, np.float32)
    root = {"root": 0} if operation(coll).has_root else {}
    plans = [getattr(comm.plan, coll)(x, **root, **wish(name)) for name in names]
    calls: list[Callable[[], Any]] = [plan.__call__ for plan in plans]
    found: list[list[tuple[float, float]]] = [[] for _ in names]
    for turn in range(turns + 1):
        # No one always follows the same one, which may have filled a link or a cache.
        for at in np.random.default_rng(turn).permutation(len(names)):
            one = took_ms(comm, calls[at])
            if turn:
                found[at].append(one)
    for name, times in zip(names, found, strict=True):
        if comm.rank == 0:
            wall, busy = (median(each) for each in zip(*times, strict=True))
            said = f"{coll} {nbytes} B {name}: {wall:.3f} ms, processors {busy:.1f} ms"
            print(said, flush=True)
    if comm.rank == 0 and names[0] == "auto":
        walls = [median(wall for wall, _ in times) for times in found]
        best = min(range(1, len(names)), key=walls.__getitem__, default=0)
        ratio = walls[0] / walls[best]
        print(f"{coll} {nbytes} B: auto takes {ratio:.2f} of {names[best]}", flush=True)


if __name__ == "__main__":
    main()
