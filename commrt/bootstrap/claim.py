# SPDX-License-Identifier: Apache-2.0
"""One process for each rank of a store: the first one that comes has it.

A process that a rank starts may come to ``init`` before the rank does. If both met the
other ranks, these would take the one's messages for the other's.
"""

from __future__ import annotations

import os
from typing import Any

from commrt.bootstrap.base import poll_until
from commrt.errors import UsageError
from commrt.launch.detect import LaunchInfo
from commrt.launch.rank_process import Process, is_running

__all__ = ["claim_rank", "claims_of"]

_LIMIT_S = 10.0
"""Seconds in which the process that came first says its name, unless it died."""


def claims_of(rank: int) -> str:
    """Return the key of a counter of the processes that came to be a rank."""
    return f"commrt/claims/{rank}"


def claim_rank(store: Any, launch: LaunchInfo) -> None:
    """Make this process the rank of ``launch`` in a store.

    Programs that one rank runs one after the other follow each other in it. Raises
    UsageError where another process has it and runs.
    """
    claims = claims_of(launch.rank)
    own = store.add(claims, 1)
    me = Process(os.getpid()).name
    earlier = (_holder(store, f"{claims}/{number}") for number in range(1, own))
    running = [one for one in earlier if one not in ("", me) and is_running(one)]
    # Nobody's, where it was refused: who comes later need not look at this process.
    store.set(f"{claims}/{own}", b"" if running else me.encode())
    if running:
        raise UsageError(_taken(launch, running[0]))


def _holder(store: Any, key: str) -> str:
    """Return the process that a claim names, as ``Process.name`` has it."""
    if not poll_until(lambda: bool(store.check([key])), _LIMIT_S):
        return ""
    return bytes(store.get(key)).decode()


def _taken(launch: LaunchInfo, name: str) -> str:
    pid = int(name.partition("-")[0])
    ancestors = {each.pid for each in Process(pid).ancestors()}
    whose = ", which this process has started," if os.getpid() in ancestors else ""
    other = "that one" if whose else "the one that is no rank"
    return (
        f"commrt.init: process {pid}{whose} is rank {launch.rank} of {launch.source} "
        f"already, and this process has the same variables: call commrt.init() here "
        f"before starting processes that do, or set COMMRT_LAUNCH=single for {other}"
    )
