# SPDX-License-Identifier: Apache-2.0
"""A call on device arrays that one rank refuses ends the communicator on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

from commrt.errors import RevokedError, UsageError


def test_all_ranks_hear_of_it() -> None:
    def main(rank: Rank) -> str:
        comm = rank.comm
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

    first, second = on_threads(2, main)
    assert "rank 1 has refused its call" in first
    assert "rank 0 gave up" in second
