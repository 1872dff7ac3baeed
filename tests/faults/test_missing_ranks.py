# SPDX-License-Identifier: Apache-2.0
"""A rank that is late, stopped or gone: who waits learns it, by name and in time."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import core_of
from commrt.errors import TimeoutError_

X = 1000


def meet(comm: Any) -> None:
    """Wait for all ranks, outside of any operation."""
    core_of(comm).world.meet(range(comm.size), "test")


def _wait_in_vain(comm: Any, x: Any, nonblocking: bool) -> None:
    if nonblocking:
        comm.allreduce(x, nonblocking=True).wait(timeout_s=0.3)
    else:
        comm.allreduce(x, timeout_s=0.3)


def late(nonblocking: bool) -> list[Any]:
    """Ranks 1 and 3 arrive after the others have given up waiting, once."""
    comm = commrt.init()
    comm.allreduce(np.ones(X))
    comm.barrier()
    text = ""
    if comm.rank % 2:
        meet(comm)
        result = comm.allreduce(np.ones(X))
    else:
        x = np.ones(X)
        with pytest.raises(TimeoutError) as raised:
            _wait_in_vain(comm, x, nonblocking)
        assert isinstance(raised.value, TimeoutError_)
        text = str(raised.value)
        meet(comm)
        result = raised.value.request.wait()  # type: ignore[attr-defined]
        assert result is x
    return [text, float(result[-1]), float(comm.allreduce(np.ones(X))[0])]


@pytest.mark.parametrize("nonblocking", [True, False])
def test_timeout_names_operation_number_and_missing_ranks(
    mpirun: Any, nonblocking: bool
) -> None:
    got = mpirun(4, late, nonblocking=nonblocking)
    for rank, (text, late_result, next_result) in enumerate(got):
        assert (late_result, next_result) == (4.0, 4.0)
        if rank % 2 == 0:
            assert text.startswith(f"allreduce #2 on world, rank {rank}: not complete")
            assert "within 0.3 s: ranks 1, 3 on this node have not started it" in text


def late_on_another_node() -> list[Any]:
    comm = commrt.init()
    text = ""
    if comm.rank == 2:
        meet(comm)
        result = comm.allreduce(np.ones(X), algorithm="ring")
    else:
        with pytest.raises(TimeoutError_) as raised:
            comm.allreduce(np.ones(X), algorithm="ring", timeout_s=0.3)
        text = str(raised.value)
        meet(comm)
        result = raised.value.request.wait()  # type: ignore[attr-defined]
    return [text, float(result[-1])]


def test_timeout_names_a_rank_of_another_node(mpirun: Any) -> None:
    got = mpirun(3, late_on_another_node, env={"COMMRT_NODES": "2,1"})
    assert [total for _, total in got] == [3.0] * 3
    for text, _ in got[:2]:
        assert "rank 2 on another node has not started it" in text


def never_called_init() -> str:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        MPI.COMM_WORLD.recv(source=0)
        return ""
    with pytest.raises(TimeoutError_) as raised:
        commrt.init()
    MPI.COMM_WORLD.send(None, dest=1)
    return str(raised.value)


def test_init_times_out_too(mpirun: Any) -> None:
    env = {"COMMRT_TIMEOUT_S": "0.5"}
    text, _ = mpirun(2, never_called_init, env=env)
    assert "not every rank of MPI_COMM_WORLD called commrt.init() within 0.5 s" in text


def stopped() -> list[Any]:
    """Rank 1 is stopped by a signal; rank 0 gives up, wakes it, and goes on."""
    comm = commrt.init()
    pids = comm.allgather(np.array([os.getpid()])).reshape(-1)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ["", float(comm.allreduce(np.ones(X))[0])]
    with pytest.raises(TimeoutError_) as raised:
        comm.allreduce(np.ones(X), timeout_s=1)
    os.kill(int(pids[1]), signal.SIGCONT)
    result = raised.value.request.wait()  # type: ignore[attr-defined]
    return [str(raised.value), float(result[0])]


def test_a_stopped_rank_is_named_and_may_come_back(mpirun: Any) -> None:
    (text, total), (_, other) = mpirun(2, stopped)
    assert "rank 1 on this node has not started it" in text
    assert total == other == 2.0


def leaves_early(how: str) -> None:
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 1:
        raise SystemExit(0 if how == "quietly" else 3)
    comm.allreduce(np.ones(X))


@pytest.mark.parametrize("how", ["quietly", "with a status"])
def test_a_rank_that_left_early_is_named(mpirun: Any, how: str) -> None:
    done = mpirun.failing(2, leaves_early, how=how)
    assert not done.timed_out
    assert done.returncode != 0
    named = "PeerFailedError" in done.stderr and "rank 1 has left" in done.stderr
    # A status of its own may make the launcher end the job before rank 0 can speak.
    assert named or (how == "with a status" and done.returncode == 3)


def all_leave() -> None:
    commrt.init().barrier()
    raise SystemExit(0)


def test_all_may_leave_by_sys_exit(mpirun: Any) -> None:
    assert mpirun.failing(3, all_leave).returncode == 0


def slow_but_moving() -> str:
    """A vector in pieces of one element, which take longer than the limit."""
    comm = commrt.init()
    x = np.ones(3_000_000, np.float32)
    with pytest.raises(TimeoutError_) as raised:
        comm.allreduce(x, algorithm="shm/ring", params={"chunk": 1}, timeout_s=0.3)
    return str(raised.value)


def test_an_operation_that_is_under_way_is_not_said_to_stand(mpirun: Any) -> None:
    for text in mpirun(2, slow_but_moving):
        assert "it is under way, with " in text
        assert "does not make progress" not in text
