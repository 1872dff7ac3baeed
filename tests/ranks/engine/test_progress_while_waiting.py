# SPDX-License-Identifier: Apache-2.0
"""A rank that waits in a set-up call still serves what it has in flight."""

from __future__ import annotations

import numpy as np

from commrt.comm import Communicator
from commrt.local import run


def test_split_does_not_stop_an_operation_in_flight() -> None:
    def main(comm: Communicator) -> float:
        x = np.full(300_000, comm.rank + 1.0)
        request = comm.allreduce(
            x, nonblocking=True, algorithm="ring", params={"chunk": 4096}
        )
        # Rank 1 needs rank 0's progress to finish; rank 0 already waits in split().
        if comm.rank == 1:
            request.wait()
        half = comm.split(0)
        assert half is not None
        request.wait()
        half.barrier()
        return float(x[-1])

    assert run(2, main) == [3.0, 3.0]
