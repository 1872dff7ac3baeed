# SPDX-License-Identifier: Apache-2.0
"""A long send that is over needs its sender no more, also where MPI carries it."""

from __future__ import annotations

import os
import select
from pathlib import Path

import numpy as np
import pytest
from mpi_ranks import MpiRun

import commrt

LIMIT_S = 240
"""Within it the receiver has everything, unless it waits for the sender."""


def sends_and_leaves(pipe: str, num: int, how: str) -> bool:
    """Rank 1 sends, and stays away from commrt until rank 0 says that it has all."""
    comm = commrt.init()
    x = np.arange(num, dtype=np.float32)
    got = np.zeros(num, np.float32)
    sign = os.open(pipe, os.O_RDWR)
    comm.barrier()
    if comm.rank == 0:
        comm.recv(got, source=1)
        os.write(sign, b"!")
        return bool((got == x).all())
    if how == "send":
        comm.send(x, dest=0)
    elif how == "request":
        comm.send(x, dest=0, nonblocking=True).wait()
    else:
        comm.multi_sendrecv(sends=[(x, 0)], recvs=[])
    ready, _, _ = select.select([sign], [], [], LIMIT_S)
    return bool(ready)


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("how", ["send", "request", "list"])
@pytest.mark.parametrize("num", [5_000, 262_144, 3_000_001])
def test_a_receiver_does_not_wait_for_a_sender_that_is_done(
    mpirun: MpiRun, tmp_path: Path, num: int, how: str
) -> None:
    pipe = str(tmp_path / "has all")
    os.mkfifo(pipe)
    # MPI copies between processes of one machine by itself, and not by its network.
    env = {
        "COMMRT_NODES": "1,1",
        "OMPI_MCA_btl": "self,tcp",
        "FI_PROVIDER": "tcp",
        "MPIR_CVAR_NOLOCAL": "1",
    }
    assert mpirun(2, sends_and_leaves, env=env, pipe=pipe, num=num, how=how) == [
        True,
        True,
    ]
