# SPDX-License-Identifier: Apache-2.0
"""Buckets of device arrays whose collective fails by NCCL, over memory of peers or by
MPI: each of their calls raises, and what comes back of their memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_checks import meet, ones
from ipc_ranks import ipc_here, on_ipc_threads
from mpi_device_ranks import mpi_here, on_mpi_threads
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank, forget_ranks

from commrt.comm import Communicator, core_of
from commrt.errors import CommError, TimeoutError_
from commrt.fusion.device_copies import BucketCopies
from commrt.fusion.device_requests import FusedDeviceRequest
from commrt.group.deferred_release import release_finished

LIMIT_S = 300.0
WAYS = ["nccl", "ipc", "mpi"]


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def run_by(way: str, main: Callable[[Rank], Any]) -> list[Any]:
    """Run ranks whose collectives on devices go this way."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if way == "nccl":
            stack.enter_context(nccl_here(is_clean=False))
            return on_nccl_threads(2, main, survives=False)
        if way == "mpi":
            stack.enter_context(mpi_here(is_clean=False))
            return on_mpi_threads(2, main, survives=False)
        stack.enter_context(ipc_here(is_clean=False))
        patch.setenv("COMMRT_ALGORITHM", "allreduce:ipc/direct")
        return on_ipc_threads(2, main, survives=False)


def fused(comm: Communicator, arrays: list[Any]) -> list[FusedDeviceRequest]:
    with comm.fused():
        requests = [comm.allreduce(x, nonblocking=True) for x in arrays]
    for each in requests:
        assert isinstance(each, FusedDeviceRequest)
        each.be_quiet()
    return requests


def warm(rank: Rank, way: str) -> tuple[Communicator, BucketCopies]:
    """Return a communicator that has run a bucket, and what copies for it."""
    comm = rank.comm.dup()
    arrays = [ones(rank), ones(rank)]
    for request in fused(comm, arrays):
        request.synchronize(timeout_s=LIMIT_S)
    assert [x.get().tolist() for x in arrays] == [[3.0] * 8] * 2
    told = comm.explain("allreduce", 64, device="cuda")
    assert str(told.choice.candidate).startswith(f"{way}/")
    [lane] = core_of(comm).fusion.buckets.lanes.values()
    return comm, lane.copies


def lose(rank: Rank, comm: Communicator) -> list[FusedDeviceRequest]:
    """Send buckets that the other rank does not, and see each of their calls fail."""
    comm.timeout_s = 0.2
    first = fused(comm, [ones(rank), ones(rank)])
    second = fused(comm, [ones(rank)])
    with pytest.raises(TimeoutError_):
        first[0].synchronize(timeout_s=LIMIT_S)
    for request in (*first, *second):
        with pytest.raises(CommError):
            request.synchronize(timeout_s=LIMIT_S)
        with pytest.raises(CommError):
            request.wait()
        with pytest.raises(CommError):
            request.test()
    with pytest.raises(CommError), comm.fused():
        comm.allreduce(ones(rank), nonblocking=True)
    rank.stream.synchronize()  # nothing holds the caller's stream
    return [*first, *second]


def settled(rank: Rank) -> bool:
    """Whether all that was left has come back, or never will."""
    deadline = time.monotonic() + LIMIT_S
    while core_of(rank.comm).world.deferred:
        release_finished(core_of(rank.comm).world)
        os.sched_yield()
        if time.monotonic() > deadline:
            return False
    return True


def is_free(copies: BucketCopies) -> bool:
    """Whether its memory went back to the device."""
    tables = copies._tables
    return copies.blocks.nbytes == 0 and (tables is None or tables._address == 0)


@pytest.mark.parametrize("way", WAYS)
def test_each_call_of_a_bucket_fails_and_its_memory_comes_back(way: str) -> None:
    """What MPI was given it may use for ever: that stays."""

    def main(rank: Rank) -> bool:
        comm, copies = warm(rank, way)
        if rank.rank == 0:
            lose(rank, comm)
        meet(rank, "lost")
        core_of(comm).give_up("the other rank did not come")
        comm.free()
        assert settled(rank)
        assert rank.comm.allreduce(np.ones(1))[0] == 2  # others go on
        meet(rank, "freed")
        return is_free(copies)

    expected = [way != "mpi", True]
    assert run_by(way, main) == expected


@pytest.mark.parametrize("way", ["nccl", "ipc"])
def test_a_bucket_that_is_not_put_back_keeps_its_memory(way: str) -> None:
    """No stream of the bucket's waits for the collective: nobody knows its end."""

    def main(rank: Rank) -> bool:
        comm, copies = warm(rank, way)
        if rank.rank == 0:

            def broken(*_: Any) -> None:
                raise RuntimeError("not put back")

            copies.put_back = broken  # type: ignore[method-assign]
            comm.timeout_s = 0.2
            for request in fused(comm, [ones(rank), ones(rank)]):
                with pytest.raises((CommError, RuntimeError)):
                    request.synchronize(timeout_s=LIMIT_S)
        meet(rank, "lost")
        core_of(comm).give_up("the other rank did not come")
        comm.free()
        assert settled(rank)
        meet(rank, "freed")
        return is_free(copies)

    assert run_by(way, main) == [False, True]
