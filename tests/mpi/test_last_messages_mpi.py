# SPDX-License-Identifier: Apache-2.0
"""Messages of other nodes that no call has asked for, when MPI ends."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import numpy as np
import pytest
from mpi_ranks import MpiRun

import commrt
from commrt.comm import core_of
from commrt.job.last_messages import take_last_messages
from commrt.mpi import library

NODES = {2: "1,1", 3: "1,2", 5: "2,2,1"}


def ends_with_messages_to_it(folder: str, num: int) -> None:
    """Rank 0 sends to the last rank, which never receives; then all end."""
    owner, mpi = os.getpid(), library.load()

    def looks_last() -> None:
        """Say whether MPI has a message; it runs after commrt's own part."""
        if os.getpid() != owner:
            return
        # A message of the same pair would be there before this meeting is over.
        mpi.COMM_WORLD.Barrier()
        found = core_of(comm).world.mpi.Iprobe()
        Path(folder, f"rank{comm.rank}").write_text(f"left: {found}")

    atexit.register(looks_last)
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 0:
        for number in range(num):
            comm.send(np.ones(number), dest=comm.size - 1, tag=number)


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("carrier", ["mpi", "tcp"])
@pytest.mark.parametrize("num", [0, 1, 5])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_no_message_is_left_when_mpi_ends(
    mpirun: MpiRun, tmp_path: Path, size: int, num: int, carrier: str
) -> None:
    mpirun(
        size,
        ends_with_messages_to_it,
        env={"COMMRT_NODES": NODES[size], "COMMRT_CARRIER": carrier},
        folder=str(tmp_path),
        num=num,
    )
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(size)]
    assert said == ["left: False"] * size


def ends_alone() -> bool:
    """Say what comes of it if the other ranks do not end, too."""
    comm = commrt.init()
    taken = True
    if comm.rank == 0:
        taken = take_last_messages(core_of(comm).world, 0.1)
    comm.barrier()
    return taken


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_do_not_end_are_not_waited_for(mpirun: MpiRun, size: int) -> None:
    said = mpirun(size, ends_alone, env={"COMMRT_NODES": NODES[size]})
    assert said == [False, *[True] * (size - 1)]


def test_ranks_of_one_node_need_no_meeting(mpirun: MpiRun) -> None:
    assert mpirun(2, ends_alone) == [True, True]
