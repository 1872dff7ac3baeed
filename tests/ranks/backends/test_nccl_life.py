# SPDX-License-Identifier: Apache-2.0
"""NCCL communicators: made together or not at all, given up in time, never stuck."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_nccl import FakeNccl

from commrt.bootstrap import ThreadWorld
from commrt.errors import (
    BackendError,
    ClosedError,
    CommError,
    MismatchError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.nccl import NcclComm, NcclConfig
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name

FLOAT = dtype_by_name("float32")
INTERNAL, USAGE, REMOTE = 3, 5, 6


def _sum(comm: NcclComm, x: np.ndarray, timeout_s: float | None = None) -> None:
    comm.run(
        "allreduce",
        x=x.ctypes.data,
        out=x.ctypes.data,
        count=x.size,
        dtype=FLOAT,
        op=ReduceOp.SUM,
        stream=1,
        timeout_s=timeout_s,
    )


def _ones(nccl: FakeNccl, comms: list[NcclComm]) -> None:
    """Check that a sum over all ranks works."""
    xs = [np.ones(3, np.float32) for _ in comms]
    nccl.on_each(comms, lambda comm: _sum(comm, xs[comm.rank]))
    assert all((x == len(comms)).all() for x in xs)


@pytest.mark.parametrize("in_progress", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_made_not_blocking_used_and_closed(size: int, in_progress: int) -> None:
    nccl = FakeNccl()
    nccl.set("in_progress", in_progress)
    with nccl.ranks(size) as comms:
        assert [comm.rank for comm in comms] == list(range(size))
        assert {comm.size for comm in comms} == {size}
        assert [comm.device for comm in comms] == list(range(size))
        _ones(nccl, comms)
    nccl.check()
    assert nccl.counter("destroyed") == size
    assert {comm.state for comm in comms} == {"closed"}


def test_a_blocking_one_lets_other_threads_run() -> None:
    """Ranks of one process wait for each other inside NCCL: not with the GIL."""
    nccl = FakeNccl()
    with nccl.ranks(3, blocking=True) as comms:
        _ones(nccl, comms)
    nccl.check()


def test_some_members_only() -> None:
    nccl = FakeNccl()
    world = ThreadWorld(4)

    def make(rank: int) -> NcclComm | None:
        if rank == 1:
            return None
        return NcclComm.create(world.bootstrap(rank), [3, 0, 2], taken=nccl.library)

    comms = [comm for comm in nccl.threads(4, make) if comm is not None]
    assert [comm.rank for comm in comms] == [1, 2, 0]
    nccl.threads(3, lambda i: comms[i].close())
    nccl.check()


def _all_fail(nccl: FakeNccl, size: int, timeout_s: float = 300.0) -> list[Exception]:
    """Return every rank's error of making a communicator."""
    world = ThreadWorld(size)

    def make(rank: int) -> Exception:
        try:
            nccl.create(world, rank, timeout_s)
        except CommError as error:
            return error
        raise AssertionError("it was made")

    return nccl.threads(size, make)


def test_one_that_hangs_makes_all_give_up() -> None:
    nccl = FakeNccl()
    nccl.set("hang_init", 2)  # rank 1
    errors = _all_fail(nccl, 3, timeout_s=0.2)
    assert isinstance(errors[1], TimeoutError_)
    for rank in (0, 2):
        assert isinstance(errors[rank], BackendError)
        assert "rank 1: joining" in str(errors[rank])
    assert nccl.counter("aborted") == 3
    assert nccl.violations() == []


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclCommInitRankConfig"])
def test_a_rank_that_fails_makes_all_fail(function: str) -> None:
    nccl = FakeNccl()
    nccl.fail(function, INTERNAL)
    errors = _all_fail(nccl, 3, timeout_s=0.5)
    assert all(isinstance(error, CommError) for error in errors)
    assert sum("internal error (3)" in str(error) for error in errors) >= 1
    assert nccl.violations() == []


def test_versions_that_differ_are_named_on_every_rank() -> None:
    nccl = FakeNccl()
    world = ThreadWorld(2)
    other = SimpleNamespace(version=22703, unique_id=nccl.library.native.unique_id)

    def make(rank: int) -> str:
        taken = nccl.library if rank == 0 else SimpleNamespace(native=other)
        with pytest.raises(MismatchError) as error:
            NcclComm.create(world.bootstrap(rank), taken=taken)
        return str(error.value)

    texts = nccl.threads(2, make)
    assert texts[0] == texts[1]
    assert "rank 0 2.28.9, rank 1 2.27.3" in texts[0]


def test_a_setting_that_the_library_lacks_is_an_error_on_all_ranks() -> None:
    nccl = FakeNccl(22602)
    world = ThreadWorld(2)

    def make(rank: int) -> str:
        config = NcclConfig(comm_name="mine") if rank == 1 else NcclConfig()
        with pytest.raises(BackendError) as error:
            NcclComm.create(world.bootstrap(rank), config=config, taken=nccl.library)
        return str(error.value)

    for text in nccl.threads(2, make):
        assert "needs NCCL 2.27.0 or newer" in text
        assert "has 2.26.2" in text


@pytest.mark.parametrize(
    ("version", "settings", "nbytes"),
    [
        (21805, {}, 48),
        (23203, {}, 48),
        (21805, {"max_ctas": 2, "split_share": True}, 48),
        (22602, {"traffic_class": 3}, 48),
        (22703, {"comm_name": "mine"}, 72),
        (22703, {"cta_policy": 2}, 72),
        (23203, {"max_p2p_peers": 8, "nvls_ctas": 4}, 96),
    ],
)
def test_the_configuration_is_no_newer_than_what_is_set(
    version: int, settings: dict, nbytes: int
) -> None:
    """The library reads as many bytes as it is told, and no field that it lacks."""
    nccl = FakeNccl(version)
    options = NcclConfig(**settings).options(version)
    size, says = options.size_and_version(version)
    assert size == nbytes
    assert says <= version
    with nccl.ranks(2, **settings):
        pass
    nccl.check()


def test_a_call_waits_until_nccl_has_taken_it_up() -> None:
    """In progress means that nothing is in the stream yet: no event may be recorded."""
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        nccl.set("in_progress", 7)
        before = nccl.counter("polls")
        _ones(nccl, comms)
        assert nccl.counter("polls") >= before + 2 * 7
    nccl.check()


def test_after_a_timeout_the_same_call_can_be_waited_for() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        xs = [np.ones(4, np.float32) for _ in comms]
        nccl.set("hang_group", 1)
        errors = nccl.errors(comms, lambda comm: _sum(comm, xs[comm.rank], 0.1))
        assert isinstance(errors[0], TimeoutError_)
        assert "rank 0 of 2" in str(errors[0])
        assert errors[1] is None
        assert comms[0].state == "live"
        assert not comms[0].poll()
        nccl.set("hang_group", 0)
        nccl.unhang(comms[0])
        comms[0].wait()
        assert comms[0].poll()
        assert (xs[0] == 2).all()
        _ones(nccl, comms)
    nccl.check()


def test_the_next_call_waits_for_one_that_timed_out() -> None:
    """NCCL would refuse it, and would stay failed."""
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        xs = [np.ones(4, np.float32) for _ in comms]
        nccl.set("hang_group", 1)
        nccl.errors(comms, lambda comm: _sum(comm, xs[comm.rank], 0.1))
        nccl.set("hang_group", 0)
        with pytest.raises(TimeoutError_):
            _sum(comms[0], xs[0], 0.1)  # still not: nothing of it is called
        nccl.unhang(comms[0])
        _ones(nccl, comms)
        assert (xs[1] == 2).all()
    nccl.check()


def test_a_deadline_between_groups_loses_the_communicator() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        x = np.ones(8, np.uint8)
        out = np.zeros(8, np.uint8)
        nccl.set("hang_group", 1)
        messages = [(x.ctypes.data, 1, 1)] * 8, [(out.ctypes.data, 1, 1)] * 8
        with pytest.raises(TimeoutError_, match="it is half done"):
            comms[0].exchange(
                *messages, dtype=dtype_by_name("uint8"), stream=1, timeout_s=0.1
            )
        with pytest.raises(RevokedError, match="a deadline passed half-way"):
            _sum(comms[0], np.ones(1, np.float32))
        for comm in comms:
            assert comm.abort(5.0)
    assert nccl.violations() == []


@pytest.mark.parametrize(
    ("code", "kind"), [(INTERNAL, BackendError), (REMOTE, PeerFailedError)]
)
def test_an_error_in_the_background_ends_the_communicator(
    code: int, kind: type
) -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        nccl.async_error(comms[1], code)
        with pytest.raises(kind, match=rf"\({code}\)"):
            comms[1].poll()
        assert comms[1].state == "failed"
        with pytest.raises(RevokedError, match="failed earlier"):
            _sum(comms[1], np.ones(1, np.float32))
        comms[1].close()  # of a failed one: abort
        assert comms[1].state == "aborted"
        comms[0].abort()
    assert nccl.violations() == []
    assert nccl.counter("aborted") == 2


@pytest.mark.parametrize("function", ["ncclAllReduce", "ncclGroupEnd", "ncclSend"])
def test_a_call_that_fails_is_an_error_with_its_text(function: str) -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        nccl.fail(function, USAGE)
        x = np.ones(2, np.float32)

        def call() -> None:
            if function == "ncclAllReduce":
                _sum(comms[0], x)
            else:
                comms[0].send(x.ctypes.data, count=2, dtype=FLOAT, dest=1, stream=1)

        with pytest.raises(BackendError, match=r"invalid usage \(5\)"):
            call()
        assert comms[0].state == "failed"
        assert nccl.depth() == 0  # the group was closed
        for comm in comms:
            comm.abort()
    assert nccl.violations() == []


def test_abort_frees_a_thread_that_waits() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        nccl.set("hang_group", 1)
        errors: list[Exception] = []
        called = threading.Event()

        def body() -> None:
            called.set()
            try:
                _sum(comms[0], np.ones(1, np.float32), 30.0)
            except CommError as error:
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        called.wait()
        while nccl.counter("calls") == 0:
            pass
        assert comms[0].abort(10.0)
        thread.join()
        assert isinstance(errors[0], RevokedError)
        comms[1].abort()
    assert nccl.violations() == []


def test_abort_that_sticks_is_left_behind() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        nccl.set("hang_abort", 1)
        assert not comms[0].abort(0.1)
        assert comms[0].state == "aborted"
        with pytest.raises(ClosedError, match="was aborted"):
            _sum(comms[0], np.ones(1, np.float32))
        nccl.release()
        assert comms[1].abort(10.0)
    assert nccl.violations() == []


def test_close_names_a_peer_that_does_not_close() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        with pytest.raises(TimeoutError_, match="close on nccl, rank 0 of 2"):
            comms[0].close(0.1)
        assert comms[0].abort()
        comms[1].abort()
    assert nccl.violations() == []


def test_close_goes_on_after_a_timeout() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        with pytest.raises(TimeoutError_):
            comms[0].close(0.1)
        assert comms[0].state == "live"
    nccl.check()  # finalised once only
    assert nccl.counter("destroyed") == 2


def test_a_split_left_half_done_ends_with_its_parent() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        nccl.set("hang_split", 1)

        def split(comm: NcclComm) -> NcclComm | None:
            try:
                return comm.split(0, timeout_s=0.1 if comm.rank == 0 else None)
            except TimeoutError_:
                return None

        children = nccl.on_each(comms, split)
        assert children[0] is None
        assert children[1] is not None
        assert [comm.state for comm in comms] == ["failed", "live"]
        nccl.unhang(comms[0])
        for comm in (children[1], *comms):
            assert comm.abort()
    assert nccl.violations() == []


def test_a_forked_child_must_not_touch_it() -> None:
    nccl = FakeNccl()
    with nccl.ranks(1) as comms:
        comms[0]._pid += 1
        with pytest.raises(ClosedError, match="fork"):
            _sum(comms[0], np.ones(1, np.float32))
        assert comms[0].abort()
        assert comms[0].state == "live"
        comms[0]._pid -= 1
    nccl.check()


def test_an_exception_in_the_block_aborts() -> None:
    nccl = FakeNccl()
    world = ThreadWorld(1)
    with pytest.raises(ZeroDivisionError), nccl.create(world, 0) as comm:
        raise ZeroDivisionError
    assert comm.state == "aborted"
    assert nccl.violations() == []


def test_a_dropped_one_warns_and_destroys_nothing() -> None:
    nccl = FakeNccl()
    kept = [nccl.create(ThreadWorld(1), 0)]
    with pytest.warns(ResourceWarning, match="dropped without close"):
        kept.clear()
    assert nccl.counter("destroyed") == nccl.counter("aborted") == 0


def test_two_threads_take_turns() -> None:
    nccl = FakeNccl()
    nccl.set("yields", 20)
    with nccl.ranks(1) as comms:
        xs = [np.ones(2, np.float32) for _ in range(4)]
        nccl.threads(4, lambda i: [_sum(comms[0], xs[i]) for _ in range(5)])
    nccl.check()
    assert nccl.counter("calls") == 20


def test_the_stub_sees_two_threads_at_once() -> None:
    """That the test above can fail."""
    nccl = FakeNccl()
    with nccl.ranks(1) as comms:
        twin = NcclComm.adopt(comms[0].pointer, taken=nccl.library)
        nccl.set("visits", nccl.visits(comms[0]) + 2)
        x = np.ones(2, np.float32)
        nccl.threads(2, lambda i: _sum((comms[0], twin)[i], x))
        assert any("another thread" in text for text in nccl.violations())
        twin.close()


@pytest.mark.parametrize("in_progress", [0, 3])
def test_split(in_progress: int) -> None:
    nccl = FakeNccl()
    nccl.set("in_progress", in_progress)
    with nccl.ranks(5) as comms:
        for _ in range(2):  # and again
            parts = nccl.on_each(
                comms,
                lambda comm: comm.split(
                    None if comm.rank == 4 else comm.rank % 2, key=-comm.rank
                ),
            )
            assert parts[4] is None
            children = [part for part in parts if part is not None]
            assert [child.size for child in children] == [2, 2, 2, 2]
            assert [child.rank for child in children] == [1, 1, 0, 0]
            xs = [np.full(2, rank, np.float32) for rank in range(4)]
            nccl.threads(4, lambda i, c=children, x=xs: _sum(c[i], x[i]))
            assert [x[0] for x in xs] == [2, 4, 2, 4]
            nccl.threads(4, lambda i, c=children: c[i].close())
    nccl.check()


def test_adopted_ones_stay_their_owners() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        sources = [
            SimpleNamespace(comm=comms[0].pointer),  # cupy
            SimpleNamespace(ptr=comms[1].pointer),  # nccl4py
        ]
        adopted = [NcclComm.adopt(one, taken=nccl.library) for one in sources]
        assert [(one.rank, one.size, one.owned) for one in adopted] == [
            (0, 2, False),
            (1, 2, False),
        ]
        _ones(nccl, adopted)
        with pytest.raises(UsageError, match="owner's to abort"):
            adopted[0].abort()
        for one in adopted:
            one.close()
            with pytest.raises(ClosedError):
                _sum(one, np.ones(1, np.float32))
        assert nccl.counter("destroyed") == 0
        _ones(nccl, comms)
    nccl.check()


class _Backend:
    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def _comm_ptr(self) -> int:
        return self._pointer


def test_torch_gives_its_pointer_once_it_has_one() -> None:
    nccl = FakeNccl()
    with nccl.ranks(1) as comms:
        adopted = NcclComm.adopt(_Backend(comms[0].pointer), taken=nccl.library)
        adopted.close()
        with pytest.raises(UsageError, match="device_id="):
            NcclComm.adopt(_Backend(0), taken=nccl.library)
        with pytest.raises(UsageError, match="expected an integer"):
            NcclComm.adopt("nccl", taken=nccl.library)
    nccl.check()


def test_the_stub_sees_a_use_after_the_end() -> None:
    nccl = FakeNccl()
    with nccl.ranks(1) as comms:
        twin = NcclComm.adopt(comms[0].pointer, taken=nccl.library)
    with pytest.raises(BackendError):
        _sum(twin, np.ones(1, np.float32))
    assert any("after its end" in text for text in nccl.violations())
