# SPDX-License-Identifier: Apache-2.0
"""What carries calls on devices without hardware: the host, NCCL, memory of peers.

with carrier_here("nccl") as run:
    run(2, lambda rank: rank.comm.allreduce(x, backend="nccl"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ipc_ranks import ipc_here, on_ipc_threads
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank, on_threads

__all__ = ["CARRIERS", "LONG_S", "Run", "carrier_here", "duplicate"]

Run = Callable[..., list[Any]]
CARRIERS = ("staged", "nccl", "ipc")
LONG_S = 300.0
"""A deadline that no rank may need."""


@contextmanager
def carrier_here(name: str) -> Iterator[Run]:
    """Yield what runs a function on ranks whose communicators may end on the way."""
    if name == "nccl":
        with nccl_here(is_clean=False):
            yield on_nccl_threads
    elif name == "ipc":
        with ipc_here(is_clean=False):
            yield lambda size, main: on_ipc_threads(size, main, survives=False)
    else:
        yield on_threads


def duplicate(rank: Rank) -> Any:
    """Return a communicator of the same ranks, whose deadlines are far away."""
    comm = rank.comm.dup()
    comm.timeout_s = LONG_S
    return comm
