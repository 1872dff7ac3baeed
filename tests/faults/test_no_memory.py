# SPDX-License-Identifier: Apache-2.0
"""A rank that has no memory for a call says so, and goes on once it has."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import core_of
from commrt.errors import CommError, RefusedError

LONG, TIMES = 16_000_000, 200


def without_memory() -> list[Any]:
    """Rank 0's calls need 32 MB of scratch and have 16; then they have them."""
    comm = commrt.init()
    x = np.ones(LONG, np.float32)
    out = np.empty(LONG // comm.size, np.float32)
    options: dict[str, Any] = {"out": out, "algorithm": "halving_doubling"}
    found: list[Any] = []
    bound = comm.plan.reduce_scatter(x, **options)
    if comm.rank == 0:
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
        for _ in range(TIMES):
            try:
                bound.start()
            except MemoryError:
                found.append("MemoryError")
        done.set()
        other.join()
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        found = [*sorted(set(found)), sys.getrefcount(x) - references]
    else:
        for _ in range(TIMES):
            with pytest.raises(RefusedError, match=r"rank 0 .* there is no memory"):
                bound()
    result = comm.reduce_scatter(x, **options)
    return [*found, float(result[0]), float(result[-1])]


def test_a_call_without_memory_leaves_nothing_behind(mpirun: Any) -> None:
    first, *others = mpirun(4, without_memory)
    assert first == ["MemoryError", 0, 4.0, 4.0]
    assert others == [[4.0, 4.0]] * 3


def asks_without_memory() -> list[str]:
    """Rank 0 has no memory for what the calls make or return; then it has."""
    comm = commrt.init()
    x = np.ones(LONG, np.float32)
    calls: list[Callable[[], Any]] = [
        comm.dup,
        lambda: comm.empty(LONG),
        lambda: comm.allgather(x),
    ]
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    comm.barrier()
    if comm.rank == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (8 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    said = []
    for call in calls:
        try:
            call()
        except CommError as error:
            said.append(f"{type(error).__name__} {'rank 0' in str(error)}")
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return [*said, str(comm.allreduce(np.ones(3))[2])]


def test_all_ranks_hear_of_one_without_memory_and_go_on(mpirun: Any) -> None:
    made = ["BackendError True"] * 2  # in the same words on all
    first, *others = mpirun(3, asks_without_memory)
    assert first == [*made, "MemoryError_ False", "3.0"]
    assert others == [[*made, "RefusedError True", "3.0"]] * 2
