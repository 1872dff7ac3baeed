# SPDX-License-Identifier: Apache-2.0
"""A call on device arrays that one rank refuses ends the communicator on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

from commrt.errors import RevokedError, UsageError


def end_by_a_refusal(rank: Rank, comm: Any) -> str:
    """Let rank 1 refuse its call; return how the communicator has ended."""
    x = rank.array(np.ones(5000, "f4"))
    out = rank.array(np.zeros(5000 + rank.rank, "f4"))
    if rank.rank == 1:
        with pytest.raises(UsageError, match="out has 5001 elements"):
            comm.allreduce(x, out=out)
    else:
        comm.allreduce(x, out=out)  # it is only given to the stream here
    rank.stream.synchronize()
    with pytest.raises(RevokedError) as raised:
        comm.allreduce(np.ones(1))
    return str(raised.value)


def test_all_ranks_hear_of_it() -> None:
    def main(rank: Rank) -> str:
        return end_by_a_refusal(rank, rank.comm)

    first, second = on_threads(2, main)
    assert "rank 1 has refused its call" in first
    assert "rank 0 gave up" in second


def test_shrink_makes_a_communicator_that_works() -> None:
    """All ranks live: the new communicator has all of them."""

    def main(rank: Rank) -> list[float]:
        comm = rank.comm.dup()
        end_by_a_refusal(rank, comm)
        renewed = comm.shrink()
        assert renewed.size == 2
        x = rank.array(np.ones(4, "f4"))
        renewed.allreduce(x, nonblocking=True).synchronize()
        value = rank.fetch(x)
        rank.stream.synchronize()
        renewed.free()
        comm.free()
        return [float(each) for each in value()]

    assert on_threads(2, main) == [[2.0] * 4] * 2
