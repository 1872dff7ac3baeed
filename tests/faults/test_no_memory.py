# SPDX-License-Identifier: Apache-2.0
"""A rank that has no memory for a call says so, and goes on once it has."""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import commrt
from commrt.comm import core_of

LONG = 16_000_000


def without_memory() -> list[Any]:
    """Rank 0's call needs 32 MB of scratch and has 16; then it has them."""
    comm = commrt.init()
    x = np.ones(LONG, np.float32)
    out = np.empty(LONG // comm.size, np.float32)
    options: dict[str, Any] = {"out": out, "algorithm": "halving_doubling"}
    found: list[Any] = []
    if comm.rank == 0:
        bound = comm.plan.reduce_scatter(x, **options)
        references = sys.getrefcount(x)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (16 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        done = threading.Event()

        def look() -> None:
            """Wants the engine's lock, and has the GIL."""
            while not done.is_set():
                core_of(comm)._records()

        other = threading.Thread(target=look)
        other.start()
        for _ in range(200):
            try:
                bound.start()
            except MemoryError:
                found.append("MemoryError")
        done.set()
        other.join()
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        found = [*sorted(set(found)), sys.getrefcount(x) - references]
    result = comm.reduce_scatter(x, **options)
    return [*found, float(result[0]), float(result[-1])]


def test_a_call_without_memory_leaves_nothing_behind(mpirun: Any) -> None:
    first, *others = mpirun(4, without_memory)
    assert first == ["MemoryError", 0, 4.0, 4.0]
    assert others == [[4.0, 4.0]] * 3
