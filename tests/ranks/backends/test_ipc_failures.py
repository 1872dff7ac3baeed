# SPDX-License-Identifier: Apache-2.0
"""Calls over memory of peers that fail, hang or end: typed errors, nothing waits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from device_checks import meet, ones, sums_to
from ipc_ranks import IpcSimRanks, ipc_here, on_ipc_threads
from staged_ranks import Rank, forget_ranks

from commrt.backends.ipc import sharing
from commrt.comm import core_of
from commrt.errors import (
    ClosedError,
    CommError,
    DeviceFailedError,
    OrderingError,
    RevokedError,
    TimeoutError_,
)


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture(autouse=True)
def ipc() -> Iterator[None]:
    with ipc_here(is_clean=False):
        yield


def test_who_waits_in_vain_goes_on_and_others_still_work() -> None:
    """The error names the operation, its number and who is missing."""

    def main(rank: Rank) -> None:
        lost = rank.comm.dup()
        sums_to(rank, lost, 3.0)
        if rank.rank == 0:
            x = ones(rank)
            request = lost.allreduce(x, nonblocking=True, timeout_s=0.2)
            with pytest.raises(TimeoutError_, match=r"allreduce #3 on .*rank 0") as e:
                request.synchronize()
            assert "rank 1 on this node has not started it" in str(e.value)
            assert "cannot be used any more" in str(e.value)
            with pytest.raises(RevokedError, match="came too late"):
                lost.allreduce(x)
        sums_to(rank, rank.comm, 3.0)
        # Its stream was let go: what it is given ends, and the memory with it.
        rank.stream.synchronize()
        meet(rank, "after")
        lost.free()

    on_ipc_threads(2, main)
    sharing.end_all(5.0)
    assert sharing.sweep() == 0


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

    on_ipc_threads(2, main)


def test_peers_of_a_rank_that_gave_up_do_not_wait_for_their_own_limit() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.comm.allreduce(x, nonblocking=True).synchronize()
        meet(rank, "warm")
        if rank.rank == 1:
            meet(rank, "started")
            core_of(rank.comm).give_up("it was told to")
            return
        request = rank.comm.allreduce(x, nonblocking=True)
        meet(rank, "started")
        with pytest.raises(RevokedError, match="rank 1 gave up at operation #3"):
            request.synchronize(timeout_s=300)
        with pytest.raises(RevokedError):
            request.wait()
        rank.stream.synchronize()

    on_ipc_threads(2, main, survives=False)


def test_a_device_that_fails_is_told_by_name() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.comm.allreduce(x, nonblocking=True, backend="ipc").synchronize()
        rank.device.fail_after(2)
        with pytest.raises(DeviceFailedError, match="failed earlier"):
            # At the call, where the device says so by then.
            rank.comm.allreduce(x, nonblocking=True, backend="ipc").synchronize(
                timeout_s=300
            )
        rank.arrays.clear()
        rank.pinned.clear()

    on_ipc_threads(1, main, survives=False)


def test_references_are_held_until_the_end() -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        x = ones(rank)
        gone = weakref.ref(x)
        rank.arrays.remove(x)
        if rank.rank == 1:
            meet(rank, "held")
            rank.comm.allreduce(x)
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

    on_ipc_threads(2, main)


# --- what a failure lets go, on simulated devices ---


def one_rank_is_gone(queues: int, seed: int, bug: str | None) -> list[str]:
    """What rank 0 is told whose peer gives up; its stream must come to its end.

    What is let go reads whatever there is, which a checker of order would report.
    """
    ranks = IpcSimRanks(2, seed, queues, bug=bug, check_order=False)

    def main(rank: Rank) -> list[str]:
        if rank.rank == 1:
            core_of(rank.comm).give_up("it was told to")
            return []
        said = []
        for number in range(3):
            try:
                x = ones(rank)
                request = rank.comm.allreduce(x, nonblocking=number % 2 == 0)
                if number % 2 == 0:
                    request.wait()
                    request.synchronize()
            except CommError as error:
                said.append(type(error).__name__)
        rank.stream.synchronize()
        return said

    try:
        return ranks.run(main)[0]
    finally:
        forget_ranks()


@pytest.mark.parametrize("queues", [0, 8])
def test_a_failure_lets_all_streams_go(queues: int, seed: int) -> None:
    for each in range(seed, seed + 3):
        assert one_rank_is_gone(queues, each, None)[-1] == "RevokedError"


def test_streams_that_are_kept_are_caught(seed: int) -> None:
    for each in range(seed, seed + 3):
        with pytest.raises(OrderingError, match="nothing can go on"):
            one_rank_is_gone(8, each, "kept")


def test_on_one_queue_only_the_peer_lets_a_stream_go(seed: int) -> None:
    """The flags' writes are behind the wait; the host is told all the same."""
    with pytest.raises(OrderingError, match="nothing can go on"):
        one_rank_is_gone(1, seed, None)


def peer_is_late(seed: int, bug: str | None) -> str:
    """What rank 1 is told of a call that rank 0 has given up before.

    Rank 0 gives up two calls; the second is held back in its stream. Rank 1 makes the
    first one: it writes a flag again that was let go, and reads what is worth nothing.
    """
    ranks = IpcSimRanks(2, seed, 0, bug=bug, check_order=False)
    held = ranks.ranks[0].pin(64)
    done: set[str] = set()

    def tell(rank: Rank, what: str) -> None:
        done.add(what)
        rank.device.flag_store(rank.stop, 0)  # something has changed

    def wait(rank: Rank, what: str) -> None:
        while what not in done:
            rank.device.pause()

    def first(rank: Rank) -> str:
        comm, ipc = rank.comm, core_of(rank.comm).attached["ipc"]
        xs = [ones(rank), ones(rank)]  # to allocate may wait for the device
        rank.device.flag_store(held, 0)
        requests = [comm.allreduce(xs[0], nonblocking=True)]
        rank.device.wait_value32_geq(rank.stream.handle, held, 1)
        requests.append(comm.allreduce(xs[1], nonblocking=True))
        for request in requests:
            request.be_quiet()
        core_of(comm).give_up("it was told to")
        while ipc.outstanding > 1:
            if not core_of(comm).world.engine.step():
                rank.device.pause()
        tell(rank, "gave up")
        wait(rank, "made its call")
        rank.device.flag_store(held, 1)
        rank.finish()
        for request in requests:
            with pytest.raises(RevokedError):
                request.synchronize()
        return ""

    def second(rank: Rank) -> str:
        x = ones(rank)
        wait(rank, "gave up")
        request = rank.comm.allreduce(x, nonblocking=True)
        request.be_quiet()
        try:
            request.synchronize()
        except RevokedError as error:
            return str(error)
        else:
            return "success"
        finally:
            rank.finish()
            tell(rank, "made its call")

    try:
        return ranks.run(lambda rank: (first, second)[rank.rank](rank))[1]
    finally:
        forget_ranks()


def test_what_is_given_up_is_no_result_elsewhere(seed: int) -> None:
    """And a flag that a late peer writes again lets later waits go all the same."""
    for each in range(seed, seed + 3):
        assert "rank 0 gave up at operation #2" in peer_is_late(each, None)


def test_a_late_flag_that_stops_later_waits_is_caught(seed: int) -> None:
    for each in range(seed, seed + 3):
        with pytest.raises(OrderingError, match="nothing can go on"):
            peer_is_late(each, "kept_behind")


def test_a_result_of_what_was_given_up_is_caught(seed: int) -> None:
    for each in range(seed, seed + 3):
        assert peer_is_late(each, "unasked") == "success"


def reader_is_late(seed: int, bug: str | None) -> str:
    """What rank 1 is told of a call that rank 0 has ended, and written over since.

    Rank 0 sends three times, and the third time waits until the first was read: it
    gives up there.
    """
    ranks = IpcSimRanks(2, seed, 0, bug=bug, check_order=False)
    done: set[str] = set()

    def main(rank: Rank) -> str:
        comm, ipc = rank.comm, core_of(rank.comm).attached["ipc"]
        xs = [rank.array(np.full(40, number, "f4")) for number in (1, 2, 3)]
        if rank.rank == 0:
            requests = [comm.bcast(x, nonblocking=True) for x in xs]
            for request in requests:
                request.be_quiet()
            while ipc.outstanding > 1:
                if not core_of(comm).world.engine.step():
                    rank.device.pause()
            core_of(comm).give_up("it was told to")
            rank.finish()
            done.add("gave up")
            rank.device.flag_store(rank.stop, 0)  # something has changed
            return ""
        while not done:
            rank.device.pause()
        request = comm.bcast(xs[2], nonblocking=True)
        request.be_quiet()
        try:
            value = rank.fetch(request.wait())
            request.synchronize()
        except RevokedError as error:
            return str(error)
        rank.stream.synchronize()
        return f"success: {value()[0]:g}"

    try:
        return ranks.run(main)[1]
    finally:
        forget_ranks()


def test_what_was_written_over_before_it_was_read_is_no_result(seed: int) -> None:
    for each in range(seed, seed + 3):
        assert "rank 0 gave up at operation #2" in reader_is_late(each, None)


def test_a_result_of_what_was_written_over_is_caught(seed: int) -> None:
    for each in range(seed, seed + 3):
        assert reader_is_late(each, "told_late") == "success: 3"


# --- the end ---


def test_who_frees_first_waits_for_nobody() -> None:
    """Its memory stays until the others have left it, and goes then."""

    def main(rank: Rank) -> int:
        comm = rank.comm.dup()
        sums_to(rank, comm, 6.0)
        if rank.rank == 0:
            comm.free()
            left = sharing.sweep(rank.device)
            meet(rank, "freed")
            with pytest.raises(ClosedError):
                comm.allreduce(ones(rank))
        else:
            meet(rank, "freed")
            left = 0
            comm.free()
        meet(rank, "all")
        return left

    assert on_ipc_threads(3, main) == [1, 0, 0]
    assert sharing.sweep() == 0


def test_what_is_dropped_is_ended_later_and_not_by_the_collector() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm.dup()
        sums_to(rank, comm, 3.0)
        while core_of(comm).devices.outstanding:
            core_of(comm).world.engine.step()
        shared = core_of(comm).attached["ipc"]._shared
        assert shared is not None
        memory = shared.memory
        del comm, shared
        gc.collect()
        meet(rank, "dropped")
        assert memory.memory  # the collector called nothing of the device
        while memory.memory:
            gc.collect()  # the other thread may have had the collector
            sharing.sweep(rank.device)

    on_ipc_threads(2, main)
    assert sharing.sweep() == 0


def test_a_process_that_ends_lets_its_streams_go() -> None:
    """Though a peer never came: a driver that closes would wait for them."""

    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        meet(rank, "warm")
        if rank.rank == 1:
            meet(rank, "ended")
            return
        request = rank.comm.allreduce(ones(rank), nonblocking=True)
        sharing.end_all(0.1)
        with pytest.raises(RevokedError, match="the process ends"):
            request.wait()
        while sharing.sweep():
            pass
        rank.stream.synchronize()
        meet(rank, "ended")

    on_ipc_threads(2, main, survives=False)


_ENDS = """
import atexit, sys
sys.path[:0] = {paths!r}
import numpy as np
import commrt
from commrt.backends.ipc import attached as ipc_calls
from commrt.backends.ipc import sharing
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice

ipc_calls.KINDS.add("threads")
atexit.register(lambda: print(len(sharing._SHARED)))
comm = commrt.init()
device = ThreadDevice()
stream = DeviceStream(device)
x = DeviceArray(device, 4)
with stream:
    comm.allreduce(x.put(np.ones(4, "f4")), backend="ipc")
    print(x.get().tolist())
    left = comm.dup()
    left.allreduce(x, backend="ipc")
print(len(sharing._SHARED))
if {forks}:
    import os
    child = os.fork()
    if child == 0:
        try:
            comm.allreduce(x)
        except commrt.errors.ClosedError:
            os._exit(7)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
comm.free()
"""


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "forks"])
def test_the_end_of_a_process_ends_what_it_made(forks: bool, tmp_path: Path) -> None:
    """Also what was never freed, and after a fork, whose child has nothing of it."""
    paths = [str(Path(__file__).parents[2] / "support")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ENDS.format(paths=paths, forks=forks)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,  # here would be the sources, which have no engine in them
        env={
            **os.environ,
            "COMMRT_LAUNCH": "single",
            # A child has threads of which only their parent's copies ended.
            "TSAN_OPTIONS": os.environ.get("TSAN_OPTIONS", "")
            + ":report_thread_leaks=0",
        },
    )
    assert done.returncode == 0, done.stderr
    wanted = ["[1.0, 1.0, 1.0, 1.0]", "2", *(["7"] if forks else []), "0"]
    assert done.stdout.splitlines() == wanted
