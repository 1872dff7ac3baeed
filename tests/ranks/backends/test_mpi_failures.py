# SPDX-License-Identifier: Apache-2.0
"""Calls of MPI on device memory that fail, hang or end: typed errors, nothing waits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from device_checks import meet, ones, sums_to
from fake_device_mpi import FakeDeviceMpi
from mpi_device_ranks import mpi_here, on_mpi_threads
from staged_ranks import Rank

from commrt import _native
from commrt.comm import core_of
from commrt.devices import DeviceArray
from commrt.errors import (
    BackendError,
    CommError,
    MismatchError,
    RevokedError,
    TimeoutError_,
)


@pytest.fixture(autouse=True)
def mpi() -> Iterator[FakeDeviceMpi]:
    with mpi_here(is_clean=False) as fake:
        yield fake
    assert fake.violations() == []


FLAGS = pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])


@FLAGS
def test_who_waits_in_vain_goes_on_and_others_still_work(flags: bool) -> None:
    """The error names the operation, its number and who is missing."""

    def main(rank: Rank) -> None:
        lost = rank.comm.dup()
        sums_to(rank, lost, 3.0)
        if rank.rank == 0:
            x = ones(rank)
            request = lost.allreduce(x, nonblocking=True, timeout_s=0.2)
            with pytest.raises(TimeoutError_, match=r"allreduce #2 on .*rank 0") as e:
                request.synchronize(timeout_s=300)
            assert "rank 1 on this node has not started it" in str(e.value)
            with pytest.raises(RevokedError, match="came too late"):
                lost.allreduce(x)
        sums_to(rank, rank.comm, 3.0)
        # Its stream was let go: what it is given ends.
        rank.stream.synchronize()
        meet(rank, "after")

    on_mpi_threads(2, main, survives=False, memory_flags=flags)


def test_a_short_look_ends_nothing() -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        x = ones(rank)
        if rank.rank == 0:
            request = rank.comm.allreduce(x, nonblocking=True)
            with pytest.raises(TimeoutError_, match="it stays in flight"):
                request.synchronize(timeout_s=0.01)
            meet(rank, "looked")
            assert request.synchronize() is x
        else:
            meet(rank, "looked")
            rank.comm.allreduce(x)
        rank.stream.synchronize()

    on_mpi_threads(2, main)


@FLAGS
def test_peers_of_a_rank_that_gave_up_do_not_wait_for_their_own_limit(
    flags: bool,
) -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.comm.allreduce(x, nonblocking=True).synchronize()
        meet(rank, "warm")
        if rank.rank == 1:
            meet(rank, "started")
            core_of(rank.comm).give_up("it was told to")
            # This rank's own would be the next operation.
            with pytest.raises(RevokedError, match="it was told to"):
                rank.comm.allreduce(x)
            return
        request = rank.comm.allreduce(x, nonblocking=True)
        meet(rank, "started")
        with pytest.raises((TimeoutError_, RevokedError)):
            request.synchronize(timeout_s=5)
        core_of(rank.comm).give_up("enough")
        rank.stream.synchronize()

    on_mpi_threads(2, main, survives=False, memory_flags=flags)


@FLAGS
@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("MPI_Iallreduce", "the MPI library refused the collective: MPI_Iallreduce"),
        ("MPI_Test", "the MPI library failed the collective: MPI_Test"),
    ],
)
def test_a_call_that_the_library_fails(
    function: str, what: str, flags: bool, mpi: FakeDeviceMpi
) -> None:
    """Streams go on, the request says what MPI said, and later calls that it failed."""

    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        meet(rank, "warm")
        if rank.rank == 1:
            meet(rank, "failed")
            return
        mpi.fail(function)
        x = ones(rank)
        request = rank.comm.allreduce(x, nonblocking=True)
        with pytest.raises(BackendError, match=f"{what} failed: pretended error 16"):
            request.synchronize(timeout_s=300)
        with pytest.raises(CommError):
            rank.comm.allreduce(x)
        rank.stream.synchronize()
        meet(rank, "failed")

    on_mpi_threads(2, main, survives=False, memory_flags=flags)


def test_ranks_that_differ_are_told() -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        request = rank.comm.allreduce(ones(rank, 8 + rank.rank), nonblocking=True)
        with pytest.raises((MismatchError, RevokedError)):
            request.synchronize(timeout_s=300)
        rank.stream.synchronize()

    on_mpi_threads(2, main, survives=False)


def test_references_are_held_until_the_end() -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        x = ones(rank)
        gone = weakref.ref(x)
        rank.arrays.remove(x)
        if rank.rank == 1:
            meet(rank, "held")
            rank.comm.allreduce(x)
            rank.stream.synchronize()
            return
        request = rank.comm.allreduce(x, nonblocking=True)
        request.be_quiet()
        call = request.call
        del x, request
        gc.collect()
        assert gone() is not None
        meet(rank, "held")
        assert call.synchronize(20.0)
        gc.collect()
        assert gone() is None

    on_mpi_threads(2, main)


def test_arrays_that_mpi_may_still_use_are_kept_for_ever(mpi: FakeDeviceMpi) -> None:
    """Those of a call that was given up; not of one that MPI was never given."""

    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        meet(rank, "warm")
        if rank.rank == 1:
            meet(rank, "looked")
            return
        arrays = [ones(rank), ones(rank)]
        gone = [weakref.ref(each) for each in arrays]
        rank.arrays.clear()
        # To free what the engine still has would wait for the stream held below.
        rank.finish()
        _native.drop_ended(core_of(rank.comm).world.engine)

        def begin(x: DeviceArray) -> Any:
            request = rank.comm.allreduce(x, nonblocking=True)
            request.be_quiet()
            return request.call

        calls = [begin(arrays[0])]
        while mpi.counter("MPI_Iallreduce") < 3:
            core_of(rank.comm).world.engine.step()
        held = rank.pin(64)
        rank.device.flag_store(held, 0)
        rank.device.wait_value32_geq(rank.stream.handle, held, 1)
        calls.append(begin(arrays[1]))
        core_of(rank.comm).give_up("it was told to")
        arrays.clear()
        rank.device.flag_store(held, 1)
        rank.stream.synchronize()
        rank.finish()
        for call in calls:
            assert call.failure[0] == "revoked"
            call.synchronize(20.0)
        gc.collect()
        assert [each() is None for each in gone] == [False, True]
        meet(rank, "looked")

    on_mpi_threads(2, main, survives=False)


def test_a_dropped_request_holds_nobody(mpi: FakeDeviceMpi) -> None:
    """Requests die by the garbage collector while a thread makes progress."""
    mpi.set("looks", 20)

    def main(rank: Rank) -> None:
        for _ in range(200):
            rank.comm.allreduce(ones(rank), nonblocking=True).be_quiet()
        rank.comm.allreduce(ones(rank), nonblocking=True).synchronize()

    on_mpi_threads(2, main)


def test_a_communicator_ends_with_calls_under_way(mpi: FakeDeviceMpi) -> None:
    """Nothing is given back that MPI or the device still has."""
    mpi.set("hold", 1)

    def main(rank: Rank) -> None:
        comm = rank.comm.dup()
        comm.allreduce(ones(rank), nonblocking=True).be_quiet()
        core_of(comm).give_up("it was told to")
        comm.free()
        rank.stream.synchronize()

    on_mpi_threads(2, main, survives=False)


def test_what_mpi_may_still_use_never_comes_back(mpi: FakeDeviceMpi) -> None:
    mpi.set("hold", 1)

    def main(rank: Rank) -> int:
        comm = rank.comm.dup()
        comm.allreduce(ones(rank), nonblocking=True).be_quiet()
        work = core_of(comm).attached["mpi"].runner(rank.device)
        while mpi.counter("MPI_Iallreduce") < 2:
            core_of(comm).world.engine.step()
        core_of(comm).give_up("it was told to")
        comm.free()
        assert core_of(comm).world.deferred == []  # nobody need ask again
        rank.stream.synchronize()
        return work.release_rest()

    assert on_mpi_threads(2, main, survives=False) == [2, 2]
