# SPDX-License-Identifier: Apache-2.0
"""Calls of MPI on memory of a device, while another thread frees some.

The card is the CPU (``cuda_on_host``): any MPI library takes its memory for the host's.
"""

from __future__ import annotations

import cuda_on_host
from held_streams import calls_beside_frees
from mpi_ranks import MpiRun

DEADLINE_S = 300.0


def test_another_thread_frees_memory_beside_calls(seed: int, mpirun: MpiRun) -> None:
    """A free waits for the streams that a call holds, and holds up the call's rest."""
    environ = cuda_on_host.environment(seed=seed, guard=False)
    found = mpirun(
        *(2, calls_beside_frees),
        env={**environ, "COMMRT_CUDA_AWARE_MPI": "flags"},
        deadline_s=DEADLINE_S,
        kind="mpi",
        number=1000,
    )
    assert found == [True, True]
