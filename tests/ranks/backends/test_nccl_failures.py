# SPDX-License-Identifier: Apache-2.0
"""Calls by NCCL that fail, hang or are refused: typed errors, and nothing waits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_nccl import FakeNccl
from nccl_ranks import NcclSimRanks, nccl_here, on_nccl_threads
from staged_ranks import Rank, forget_ranks

from commrt import nccl as nccl_package
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice
from commrt.errors import (
    BackendError,
    CommError,
    DeviceFailedError,
    MismatchError,
    OrderingError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.nccl.orders import end_all

INTERNAL, REMOTE = 3, 6


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def nccl() -> Iterator[FakeNccl]:
    with nccl_here(is_clean=False) as fake:
        yield fake


def ones(rank: Rank, count: int = 8) -> DeviceArray:
    return rank.array(np.full(count, 1.0 + rank.rank, "f4"))


def sums_to(rank: Rank, comm: Any, wanted: float) -> None:
    """Check that a communicator works."""
    x = ones(rank)
    comm.allreduce(x)
    value = rank.fetch(x)
    rank.stream.synchronize()
    assert value().tolist() == [wanted] * 8


def test_who_waits_in_vain_aborts_and_others_still_work(nccl: FakeNccl) -> None:
    """The error names the operation, its number and who is missing."""

    def main(rank: Rank) -> None:
        lost = rank.comm.dup()
        sums_to(rank, lost, 3.0)
        if rank.rank == 0:
            x = ones(rank)
            request = lost.allreduce(x, nonblocking=True, timeout_s=0.2)
            with pytest.raises(
                TimeoutError_, match=r"allreduce #3 on .*rank 0: .*"
            ) as e:
                request.synchronize()
            assert "rank 1 on this node has not started it" in str(e.value)
            assert "cannot be used any more" in str(e.value)
            with pytest.raises(RevokedError, match="came too late"):
                lost.allreduce(x)
        sums_to(rank, rank.comm, 3.0)
        rank.comm.barrier()
        # Its stream was let go: what it is given ends.
        rank.stream.synchronize()

    on_nccl_threads(2, main)
    assert nccl.counter("aborted") >= 1


def test_a_short_look_ends_nothing(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        x = ones(rank)
        if rank.rank == 0:
            request = rank.comm.allreduce(x, nonblocking=True)
            with pytest.raises(TimeoutError_, match="it stays in flight"):
                request.synchronize(timeout_s=0.01)
            core_of(rank.comm).world.bootstrap.exchange([0, 1], "looked", b"", 20)
            assert request.synchronize() is x
        else:
            core_of(rank.comm).world.bootstrap.exchange([0, 1], "looked", b"", 20)
            rank.comm.allreduce(x)
        rank.stream.synchronize()

    on_nccl_threads(2, main)
    assert nccl.violations() == []
    assert nccl.counter("aborted") == 0


def test_peers_of_a_rank_that_gave_up_do_not_wait_for_their_own_limit(
    nccl: FakeNccl,
) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        x = ones(rank)
        if rank.rank == 1:
            core_of(rank.comm).world.bootstrap.exchange([0, 1], "started", b"", 20)
            core_of(rank.comm).give_up("it was told to")
            return
        request = rank.comm.allreduce(x, nonblocking=True)
        core_of(rank.comm).world.bootstrap.exchange([0, 1], "started", b"", 20)
        with pytest.raises(RevokedError, match="rank 1 gave up at operation #3"):
            request.synchronize(timeout_s=300)
        rank.stream.synchronize()

    on_nccl_threads(2, main)


@pytest.mark.parametrize(
    ("code", "error"), [(INTERNAL, BackendError), (REMOTE, PeerFailedError)]
)
def test_what_nccl_refuses_is_raised_at_the_call(
    nccl: FakeNccl, code: int, error: type[Exception]
) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 1.0)
        nccl.fail("ncclAllReduce", code)
        with pytest.raises(error, match=r"allreduce #3 on local, rank 0: NCCL failed"):
            rank.comm.allreduce(ones(rank))
        with pytest.raises(RevokedError):
            rank.comm.allreduce(ones(rank))
        other = ones(rank)
        value = rank.fetch(other)
        rank.stream.synchronize()
        assert value().tolist() == [1.0] * 8

    on_nccl_threads(1, main)


def test_an_error_in_the_background_comes_at_wait(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        if rank.rank == 1:
            return
        request = rank.comm.allreduce(ones(rank), nonblocking=True)
        _, work = core_of(rank.comm).attached["nccl"]._made
        nccl.async_error(SimpleNamespace(pointer=work.comm_pointer), REMOTE)
        with pytest.raises(PeerFailedError, match="remote process exited"):
            request.synchronize(timeout_s=300)
        with pytest.raises(PeerFailedError):
            request.wait()

    on_nccl_threads(2, main)


def test_what_stays_in_progress_is_given_up_at_its_limit(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 1.0)
        nccl.set("hang_group", 1)
        with pytest.raises(
            TimeoutError_, match=r"NCCL had not taken it up after 0\.2 s"
        ):
            rank.comm.allreduce(ones(rank), timeout_s=0.2)
        nccl.set("hang_group", 0)

    on_nccl_threads(1, main)


def test_a_device_that_fails_is_told_by_name(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 1.0)
        x = ones(rank)
        rank.stream.synchronize()
        rank.device.fail_after(2)
        with pytest.raises(DeviceFailedError, match="failed earlier"):
            # At the call, where the device says so by then.
            rank.comm.allreduce(x, nonblocking=True).synchronize(timeout_s=300)
        rank.arrays.clear()
        rank.pinned.clear()
        rank.stream.synchronize = lambda: None  # type: ignore[method-assign]

    on_nccl_threads(1, main)


@pytest.mark.parametrize("queues", [1, 8])
def test_a_failure_lets_all_streams_go(queues: int, seed: int) -> None:
    _one_rank_is_gone(queues, seed, None)


def test_a_communicator_that_is_not_aborted_is_caught(seed: int) -> None:
    with pytest.raises(OrderingError, match="nothing can go on"):
        _one_rank_is_gone(8, seed, "kept")


def _one_rank_is_gone(queues: int, seed: int, bug: str | None) -> None:
    with nccl_here(is_clean=False):
        ranks = NcclSimRanks(2, seed, queues, bug=bug)

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
            found = ranks.run(main)
            ranks.world.check()
        finally:
            forget_ranks()
    assert found[0][-1] == "RevokedError"


def test_references_are_held_until_the_end(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        x = ones(rank)
        gone = weakref.ref(x)
        rank.arrays.remove(x)
        if rank.rank == 1:
            core_of(rank.comm).world.bootstrap.exchange([0, 1], "held", b"", 20)
            rank.comm.allreduce(x)
            return
        request = rank.comm.allreduce(x, nonblocking=True)
        request.be_quiet()
        call = request.call
        del x, request
        gc.collect()
        assert gone() is not None
        core_of(rank.comm).world.bootstrap.exchange([0, 1], "held", b"", 20)
        assert call.synchronize(20.0)
        gc.collect()
        assert gone() is None

    on_nccl_threads(2, main)


def test_threads_of_a_rank_call_one_after_the_other(seed: int) -> None:
    """NCCL must not be called for two communicators of a device at once."""
    assert _two_threads(seed, None) == []


def test_a_lock_left_out_is_caught(seed: int) -> None:
    caught = [each for each in range(seed, seed + 5) if _two_threads(each, "unlocked")]
    assert len(caught) == 5


def _two_threads(seed: int, bug: str | None) -> list[str]:
    with nccl_here(is_clean=False) as nccl:
        ranks = NcclSimRanks(1, seed, 8, bug=bug, communicators=2, preempt=0.7)
        rank = ranks.ranks[0]

        def caller(comm: Any) -> Callable[[], None]:
            def call() -> None:
                stream = DeviceStream(rank.device)
                x = DeviceArray(rank.device, 8)
                for _ in range(6):
                    comm.allreduce(x, stream=stream, nonblocking=True).be_quiet()
                stream.synchronize()

            return call

        try:
            ranks.world.run(
                {str(i): caller(comm) for i, comm in enumerate(ranks.groups[0])}
            )
        except CommError as error:
            if bug is None:
                raise
            return [str(error)]
        finally:
            forget_ranks()
        return nccl.violations() + ranks.world.violations


# --- choosing, and what is refused ---


def explained(rank: Rank, coll: str, **asked: Any) -> str:
    return str(rank.comm.explain(coll, 64, device="cuda", **asked))


def test_who_asks_for_nccl_gets_its_own_collective(nccl: FakeNccl) -> None:
    """A schedule on NCCL runs where it is named, or where NCCL itself refuses."""

    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        assert ": nccl/native\n" in explained(rank, "allreduce", backend="nccl")
        rank.comm.allreduce(ones(rank), backend="nccl")
        told = explained(rank, "allreduce", backend="nccl", op="bxor", dtype="int32")
        assert ": nccl/" in told
        assert ": nccl/native" not in told
        told = explained(rank, "allreduce", algorithm="nccl/ring")
        assert ": nccl/ring" in told

    on_nccl_threads(2, main)
    assert nccl.counter("groups") == 0


def test_what_nccl_lacks_is_staged_and_named(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        assert ": nccl/native" in explained(rank, "allreduce")
        for coll, asked, reason in [
            ("allreduce", {"op": "bxor", "dtype": "int32"}, "no bitwise reductions"),
            ("allreduce", {"op": "max"}, "drop NaN"),
            ("reduce_scatter", {"dtype": "int16"}, "does not reduce int16"),
            ("scan", {}, "no prefix reductions"),
        ]:
            told = explained(rank, coll, **asked)
            assert ": staged/" in told
            assert "not    nccl/native: NCCL" in told
            assert reason in told
        x = rank.array(np.ones(4, "i2"))
        with pytest.raises(BackendError, match="NCCL does not reduce int16"):
            rank.comm.allreduce(x, algorithm="nccl/native")
        with pytest.raises(UsageError, match="ring"):
            rank.comm.allreduce(ones(rank), algorithm="nccl/rings")
        rank.comm.allreduce(x)
        # A schedule sums what NCCL does not, where the call asks for NCCL.
        out = rank.array(np.zeros(4, "i2"))
        rank.comm.allreduce(x, out=out, backend="nccl")
        summed = rank.fetch(out)
        rank.stream.synchronize()
        assert summed().tolist() == [4] * 4
        before = nccl.counter("kernels")
        rank.comm.allreduce(ones(rank), backend="staged")
        rank.comm.allreduce(ones(rank), algorithm="staged/direct")
        rank.stream.synchronize()
        assert nccl.counter("kernels") == before

    on_nccl_threads(2, main)
    assert nccl.violations() == []


def test_one_order_is_not_left_to_nccl(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm.dup(deterministic=True)
        sums_to(rank, comm, 3.0)
        told = str(comm.explain("allreduce", 64, device="cuda"))
        assert ": staged/" in told
        assert "deterministic=True asks for one order" in told
        comm.free()

    on_nccl_threads(2, main)
    assert nccl.counter("kernels") == 0


def test_the_variable_asks_for_a_backend_of_devices(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_ALGORITHM", "allreduce:nccl/native,bcast:staged/native")

    def main(rank: Rank) -> None:
        assert rank.comm.allreduce(np.ones(3, "f4")).tolist() == [2.0] * 3
        sums_to(rank, rank.comm, 3.0)
        with pytest.raises(BackendError, match="COMMRT_ALGORITHM asks for nccl/native"):
            rank.comm.allreduce(rank.array(np.ones(3, "i2")))

    on_nccl_threads(2, main)


def test_where_one_rank_has_no_nccl_all_run_staged(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 1:
            mine = core_of(rank.comm).attached["nccl"]
            place = mine.tells(rank.device)["place"]
            mine.tells = lambda device: {"why": "not to be found", "place": place}
        sums_to(rank, rank.comm, 3.0)
        told = explained(rank, "allreduce")
        assert "not    nccl/native: rank 1: not to be found" in told
        with pytest.raises(BackendError, match="rank 1: not to be found"):
            rank.comm.allreduce(ones(rank), backend="nccl")

    on_nccl_threads(2, main)
    assert nccl.counter("made") == 0


def test_where_nccl_makes_no_communicator_all_run_staged(nccl: FakeNccl) -> None:
    nccl.fail("ncclCommInitRankConfig", INTERNAL)

    def main(rank: Rank) -> None:
        rank.comm.timeout_s = 0.5  # who joins waits so long for who cannot
        sums_to(rank, rank.comm, 3.0)
        assert "not all ranks could make" in explained(rank, "allreduce") or (
            "joining" in explained(rank, "allreduce")
        )

    on_nccl_threads(2, main)
    assert nccl.counter("kernels") == 0


def test_a_communicator_is_of_one_device(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 1.0)
        with ThreadDevice(ordinal=1) as other:
            x = DeviceArray(other, 4)
            with pytest.raises(UsageError, match="a communicator for each device"):
                rank.comm.allreduce(x)

    on_nccl_threads(1, main)


def test_split_communicators_have_their_own_and_end_with_them(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        half = rank.comm.split(rank.rank % 2)
        sums_to(rank, rank.comm, 6.0)
        sums_to(rank, half, 4.0 if rank.rank % 2 == 0 else 2.0)
        half.free()

    on_nccl_threads(3, main)
    end_all(5.0)
    assert nccl.counter("made") == 6
    assert nccl.counter("destroyed") == 6
    nccl.check()


def test_what_is_dropped_is_ended_later_and_not_by_the_collector(
    nccl: FakeNccl,
) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm.dup()
        sums_to(rank, comm, 3.0)
        while core_of(comm).devices.outstanding:
            core_of(comm).world.engine.step()
        nccl.set("log", 1)
        del comm
        gc.collect()
        assert [line for line in nccl.log() if "Finalize" in line] == []
        nccl.set("log", 0)
        core_of(rank.comm).world.bootstrap.exchange([0, 1], "dropped", b"", 20)

    on_nccl_threads(2, main)
    gc.collect()  # the other thread may have had the collector
    end_all(5.0)
    assert nccl.counter("destroyed") == nccl.counter("made")
    nccl.check()


def test_who_ends_alone_does_not_wait_for_the_others(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        while core_of(rank.comm).devices.outstanding:
            core_of(rank.comm).world.engine.step()
        if rank.rank == 0:
            made = core_of(rank.comm).attached["nccl"]._made
            core_of(rank.comm).attached["nccl"].close()
            assert made is not None
        core_of(rank.comm).attached["nccl"]._made = None

    on_nccl_threads(2, main)
    end_all(0.1)
    assert nccl.counter("aborted") >= 1


def test_nccl_serves_the_kinds_of_devices_it_says() -> None:
    def main(rank: Rank) -> None:
        sums_to(rank, rank.comm, 3.0)
        assert (
            "no use of a threads device"
            in core_of(rank.comm).attached["nccl"].facts.why
        )

    assert nccl_package.taken() is None or "cuda" in nccl_package.taken().serves
    on_nccl_threads(2, main)


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later"])
def test_check_mode_names_the_operations_where_ranks_diverge(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        if warm:
            sums_to(rank, rank.comm, 3.0)
        x = ones(rank)
        with pytest.raises(MismatchError, match="operation=allreduce") as error:
            getattr(rank.comm, ("allreduce", "bcast")[rank.rank])(x)
        assert "operation=bcast" in str(error.value)
        with pytest.raises(MismatchError, match="memory=device"):
            rank.comm.allreduce(x if rank.rank else np.ones(8, "f4"))
        sums_to(rank, rank.comm, 3.0)

    on_nccl_threads(2, main)
    assert nccl.violations() == []


def test_without_check_mode_a_first_call_that_differs_is_named(nccl: FakeNccl) -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        with pytest.raises(MismatchError, match="rank 0: allreduce; rank 1: bcast"):
            getattr(rank.comm, ("allreduce", "bcast")[rank.rank])(x)

    on_nccl_threads(2, main)


_ENDS = """
import sys
sys.path[:0] = {paths!r}
import numpy as np
import commrt
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice
from commrt.nccl import libnccl
from fake_nccl import FakeNccl
import atexit

nccl = FakeNccl()
libnccl._found[:] = [nccl.serve_devices()]
atexit.register(lambda: print(nccl.counter("destroyed"), nccl.violations()))
comm = commrt.init()
device = ThreadDevice()
stream = DeviceStream(device)
x = DeviceArray(device, 4)
with stream:
    comm.allreduce(x.put(np.ones(4, "f4")))
    print(x.get().tolist())
    left = comm.dup()
    left.allreduce(x)
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
left.free()
"""


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "forks"])
def test_the_end_of_a_process_ends_what_it_made(forks: bool, tmp_path: Path) -> None:
    """Also after a fork, whose child has no NCCL."""
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
    lines = done.stdout.splitlines()
    assert lines[0] == "[1.0, 1.0, 1.0, 1.0]"
    assert lines[1:-1] == (["7"] if forks else [])
    assert lines[-1] == "2 []"
