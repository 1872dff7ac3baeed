# SPDX-License-Identifier: Apache-2.0
"""What tests of failures on devices ask of a communicator, and how their ranks meet."""

from __future__ import annotations

from typing import Any

import numpy as np
from staged_ranks import Rank

from commrt.comm import core_of
from commrt.devices import DeviceArray

__all__ = ["meet", "ones", "sums_to"]


def ones(rank: Rank, count: int = 8) -> DeviceArray:
    """Return an array of one more than the rank."""
    return rank.array(np.full(count, 1.0 + rank.rank, "f4"))


def sums_to(rank: Rank, comm: Any, wanted: float) -> None:
    """Check that a communicator works."""
    x = ones(rank)
    comm.allreduce(x)
    value = rank.fetch(x)
    rank.stream.synchronize()
    assert value().tolist() == [wanted] * 8


def meet(rank: Rank, what: str) -> None:
    """Wait for the other ranks, beside what they test."""
    world = core_of(rank.comm).world
    world.bootstrap.exchange(range(rank.comm.size), what, b"", 20)
