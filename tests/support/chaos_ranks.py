# SPDX-License-Identifier: Apache-2.0
"""Ranks on each kind of link, whose operations COMMRT_CHAOS injects faults into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_mpi import FakeMpi
from relay_ranks import RelayRanks

from commrt.comm import Communicator
from commrt.errors import CommError
from commrt.local import LocalRanks

__all__ = [
    "LATE_S",
    "LAYOUTS",
    "ON_A_NODE",
    "SIZES",
    "gather",
    "gathered",
    "outcomes",
]

LAYOUTS = {
    "one node of 2": lambda: LocalRanks(2),
    "one node of 3": lambda: LocalRanks(3),
    "one node of 5": lambda: LocalRanks(5),
    "a relay": lambda: RelayRanks([[0], [1]]),
    "a relay and memory": lambda: RelayRanks([[0, 1], [2]]),
    "MPI": lambda: FakeMpi().ranks([[0], [1]]),
    "MPI and memory": lambda: FakeMpi().ranks([[0, 1], [2]]),
}
ON_A_NODE = [name for name in LAYOUTS if name.startswith("one")]
SIZES = (1, 7, 1001, 70_001)
LATE_S = 1.0

Outcome = list[Any]


def outcomes(
    layout: str,
    chaos: str,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Communicator, int], Any],
    *,
    calls: int = 5,
) -> list[Outcome]:
    """Return what each call gave on each rank, up to its first error."""
    monkeypatch.setenv("COMMRT_CHAOS", chaos)
    ranks = LAYOUTS[layout]()

    def program(comm: Communicator) -> Outcome:
        found: Outcome = []
        for turn in range(calls):
            try:
                found.append(call(comm, turn))
            except CommError as error:
                found.append(error)
                break
        return found

    found = ranks.each(program)
    if isinstance(ranks, RelayRanks):
        ranks.leave()
    return found


def gathered(size: int, count: int) -> np.ndarray[Any, Any]:
    """Return what ``gather`` gives."""
    rows = [np.arange(count) * (rank + 1) for rank in range(size)]
    return np.array(rows)


def gather(count: int) -> Callable[[Communicator, int], Any]:
    """Return a call in which each rank's message shows."""

    def call(comm: Communicator, turn: int) -> Any:
        x = np.arange(count) * (comm.rank + 1)
        out = np.empty((comm.size, count), x.dtype)
        return comm.allgather(x, out=out, algorithm="direct")

    return call
