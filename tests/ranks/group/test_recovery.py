# SPDX-License-Identifier: Apache-2.0
"""Revoke, agree and shrink, for ranks that are threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commrt import SparseVector, local
from commrt.comm import Communicator, core_of
from commrt.errors import (
    ClosedError,
    MismatchError,
    RevokedError,
    TimeoutError_,
    UsageError,
)

_SIZES = [1, 2, 3, 5]


def _sum(comm: Communicator) -> float:
    return float(comm.allreduce(np.array([2.0**comm.rank]))[0])


def _until_it_fails(comm: Communicator) -> None:
    for _ in range(1_000_000):
        comm.allreduce(np.ones(3))


@pytest.mark.parametrize("size", _SIZES)
def test_all_ranks_go_on_after_a_revoke(size: int) -> None:
    def main(comm: Communicator) -> list[object]:
        comm.timeout_s = 300
        if comm.rank == size - 1:
            comm.revoke("step 17 hangs")
        with pytest.raises(RevokedError, match="step 17 hangs") as raised:
            _until_it_fails(comm)
        who = f"rank {size - 1} gave up" if comm.rank < size - 1 else "call shrink()"
        assert who in str(raised.value)
        made = comm.shrink()
        assert (made.rank, made.size, made.timeout_s) == (comm.rank, comm.size, 300)
        comm.free()
        return [_sum(made), made.name]

    assert local.run(size, main) == [[2.0**size - 1, "local.2"]] * size


def test_calls_in_flight_end_on_all_ranks() -> None:
    """Rank 2 makes none of them, and revokes."""

    def main(comm: Communicator) -> float:
        comm.timeout_s = 300
        if comm.rank != 2:
            out = np.zeros(100_000)
            calls = [
                comm.allreduce(np.ones(100_000), out=out, nonblocking=True),
                comm.allreduce(np.ones(3), nonblocking=True),
                comm.recv(np.empty(3), source=2, nonblocking=True),
                comm.recv(np.empty(3), nonblocking=True),
            ]
            ready.wait()
            for each in calls:
                with pytest.raises(RevokedError):
                    each.wait()
            out[:] = 1.0  # nobody writes to it any more
        else:
            ready.wait()
            comm.revoke()
        return _sum(comm.shrink())

    ready = threading.Barrier(3, timeout=300)
    assert local.run(3, main) == [7.0] * 3


def _of_object(comm: Communicator, **more: Any) -> Any:
    """Return the request of a call with objects, which shows it where it is late."""
    if not more:
        return comm.gather_object(comm.rank)
    with pytest.raises(TimeoutError_) as raised:
        comm.gather_object(comm.rank, timeout_s=1e-3)
    return raised.value.request


def _fused(comm: Communicator, **more: Any) -> Any:
    with comm.fused():
        request = comm.allreduce(np.ones(3), nonblocking=True)
    return request if more else request.wait()


def _planned(comm: Communicator, **more: Any) -> Any:
    plan = comm.plan.allreduce(np.ones(3))
    return plan.start() if more else plan()


REQUESTS: dict[str, Callable[..., Any]] = {
    "sum": lambda comm, **more: comm.allreduce(np.ones(3), **more),
    "large sum": lambda comm, **more: comm.allreduce(np.ones(300_000), **more),
    "barrier": lambda comm, **more: comm.barrier(**more),
    "compressed": lambda comm, **more: comm.allreduce(
        np.ones(3000, np.float32), compress="float16", **more
    ),
    "sparse": lambda comm, **more: comm.sparse_allreduce(
        SparseVector(np.array([1]), np.ones(1), shape=5), **more
    ),
    "topk": lambda comm, **more: comm.topk_allreduce(np.ones(50), 3, **more),
    "messages": lambda comm, **more: comm.multi_sendrecv(
        sends=[(np.ones(3), rank) for rank in range(comm.size)],
        recvs=[(np.ones(3), rank) for rank in range(comm.size)],
        **more,
    ),
    "objects": _of_object,
    "fused": _fused,
    "planned": _planned,
}


@pytest.mark.parametrize("revokes", [[0], [0, 1], [2]])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_of_any_kind_ends_by_a_revoke(kind: str, revokes: list[int]) -> None:
    """Rank 2 does not make the second call."""

    def main(comm: Communicator) -> float:
        comm.timeout_s = 300
        REQUESTS[kind](comm)
        request = None
        if comm.rank != 2:
            request = REQUESTS[kind](comm, nonblocking=True)
        begun.wait()
        if comm.rank in revokes:
            comm.revoke()
        if request is not None:
            with pytest.raises(RevokedError):
                request.wait(timeout_s=240)
        ended.wait()
        total = _sum(comm.shrink())
        comm.free()
        return total

    begun, ended = (threading.Barrier(3, timeout=300) for _ in range(2))
    assert local.run(3, main, timeout_s=250) == [7.0] * 3


def test_a_timeout_with_nobody_dead_is_recovered_from() -> None:
    def main(comm: Communicator) -> float:
        if comm.rank == 0:
            late.wait(300)
            with pytest.raises(RevokedError):
                _until_it_fails(comm)
        else:
            with pytest.raises(TimeoutError_):
                comm.allreduce(np.ones(3), timeout_s=0.1)
            both.wait()  # a revoke ends the other's call before its limit does
            comm.revoke("a rank is late")
            late.set()
        comm.timeout_s = 300
        made = comm.shrink()
        comm.free()
        return _sum(made)

    late = threading.Event()
    both = threading.Barrier(2, timeout=300)
    assert local.run(3, main) == [7.0] * 3


def test_communicators_made_from_it_end_too() -> None:
    """Rank 1 waits in a part of a part, for a rank that has gone to shrink()."""
    made = threading.Barrier(4)

    def main(comm: Communicator) -> list[float]:
        comm.timeout_s = 300
        part = comm.split(comm.rank // 2)
        grid = part.cart((0,))
        other = comm.dup()
        parts_of_others = other.split(comm.rank // 2)
        made.wait(240)
        if comm.rank == 1:
            with pytest.raises(RevokedError):
                grid.allreduce(np.ones(3))
            with pytest.raises(RevokedError):
                comm.allreduce(np.ones(3))
        elif comm.rank == 0:
            comm.revoke()
            with pytest.raises(RevokedError):
                grid.allreduce(np.ones(3))
        else:  # its own part works, until it ends the whole
            assert _sum(grid) == 3.0
            with pytest.raises(RevokedError):
                _until_it_fails(comm)
            comm.revoke()
        part.revoke()
        sums = [_sum(part.shrink())]
        for each in (parts_of_others, other, comm):
            each.revoke()
            sums.append(_sum(each.shrink()))
        return sums

    assert local.run(4, main) == [[3.0, 3.0, 15.0, 15.0]] * 4


@pytest.mark.parametrize("between", ["kept", "freed", "gone"])
def test_a_death_in_what_was_made_from_it_is_enough_to_shrink(between: str) -> None:
    """A part of the ranks may hear of a death before the whole does."""
    are_refused = threading.Barrier(3)

    def main(comm: Communicator) -> list[object]:
        comm.timeout_s = 300
        maker = comm.split(0)
        part = maker.dup()
        if between == "freed":
            maker.free()
        if between == "gone":
            core = weakref.ref(core_of(maker))
            del maker
            while core() is not None:
                gc.collect()
        with pytest.raises(UsageError, match="has not failed"):
            comm.shrink()
        are_refused.wait(240)
        core_of(part).set_failure("rank 3 has died", by_death=True)
        return [_sum(comm.shrink())]

    assert local.run(3, main) == [[7.0]] * 3


@pytest.mark.parametrize("how", ["create_group", "dup", "split", "cart", "graph"])
def test_who_makes_one_does_not_wait_for_ranks_that_have_left(how: str) -> None:
    """Rank 1 ends the communicator where the others make one with it."""

    def main(comm: Communicator) -> float:
        comm.timeout_s = 300
        if comm.rank == 1:
            comm.revoke("it has heard of a fault")
        else:
            make: dict[str, Callable[[], object]] = {
                "create_group": lambda: comm.create_group([0, 1, 2]),
                "dup": comm.dup,
                "split": lambda: comm.split(0),
                "cart": lambda: comm.cart((0,)),
                "graph": lambda: comm.graph([comm.rank], [comm.rank]),
            }
            with pytest.raises(RevokedError, match=r"heard of a fault|shrink\(\)"):
                make[how]()
        return _sum(comm.shrink())

    assert local.run(3, main) == [7.0] * 3


@pytest.mark.parametrize("ended", [[0], [2], [1, 3]])
def test_ranks_that_have_ended_are_left_out(ended: list[int]) -> None:
    left = [rank for rank in range(4) if rank not in ended]

    def main(comm: Communicator) -> list[object]:
        comm.timeout_s = 300
        if comm.rank in ended:
            comm.revoke("it leaves")
            return []
        with pytest.raises(RevokedError):
            _until_it_fails(comm)
        assert comm.agree(~(1 << comm.rank)) == ~sum(1 << rank for rank in left)
        made = comm.shrink(name="rest")
        again = made.agree(6 - made.rank)
        return [made.rank, made.size, made.name, _sum(made), again]

    found = local.run(4, main)
    size = len(left)
    both = 6 & 5 if size == 2 else 6 & 5 & 4
    for number, rank in enumerate(left):
        assert found[rank] == [number, size, "rest", 2.0**size - 1, both]


@pytest.mark.parametrize("size", _SIZES)
def test_ranks_agree_on_a_communicator_that_works(size: int) -> None:
    def main(comm: Communicator) -> list[int]:
        flags = [comm.agree(), comm.agree(comm.rank != size - 1), comm.agree(-1)]
        return [*flags, int(_sum(comm))]

    assert local.run(size, main) == [[1, 0, -1, 2**size - 1]] * size


def test_who_agrees_hears_of_those_who_shrink() -> None:
    """Rank 0 finds no fault; the others do."""

    def main(comm: Communicator) -> float:
        comm.timeout_s = 300
        if comm.rank == 0:
            with pytest.raises(RevokedError, match=r"rank 1 shrink\(\).*call shrink"):
                comm.agree()
        else:
            comm.revoke()
        return _sum(comm.shrink())

    assert local.run(3, main) == [7.0] * 3


def test_what_it_was_like_stays() -> None:
    def main(comm: Communicator) -> None:
        exact = comm.dup(deterministic=True)
        exact.timeout_s = 777
        exact.revoke()
        made = exact.shrink()
        assert (made.deterministic, made.timeout_s) == (True, 777)

    local.run(2, main)


def test_plans_and_symmetric_memory_of_the_old_one_end(
    run_threads: Callable[..., object],
) -> None:
    def main(comm: Communicator) -> None:
        mine = comm.empty(100)
        mine[:] = comm.rank
        plan = comm.plan.allreduce(np.ones(4))
        plan()
        comm.revoke()
        with pytest.raises(RevokedError):
            plan()
        with pytest.raises(RevokedError):
            comm.allreduce(mine)
        with pytest.raises(RevokedError):
            comm.empty(3)
        made = comm.shrink()
        comm.free()
        assert mine[3] == comm.rank  # it is there as long as anybody holds it
        theirs = made.empty(100)
        theirs[:] = 1.0
        assert made.allreduce(theirs)[99] == 2.0

    local.run(2, main)


def test_check_mode_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(comm: Communicator) -> float:
        comm.timeout_s = 300
        if comm.rank == 1:
            comm.revoke()
        with pytest.raises(RevokedError):
            _until_it_fails(comm)
        made = comm.shrink()
        with pytest.raises(MismatchError):
            made.allreduce(np.ones(3), op="sum" if made.rank else "max")
        return _sum(made)

    assert local.run(3, main) == [7.0] * 3


_OF_SERVICES: dict[str, Callable[[Communicator], Any]] = {
    "objects": lambda comm: comm.allgather_object(comm.rank),
    "sparse": lambda comm: comm.sparse_allreduce(
        SparseVector(np.array([1]), np.ones(1), (8,))
    ),
    "compressed": lambda comm: comm.allreduce(np.ones(3000), compress="int8"),
}


@pytest.mark.parametrize("service", _OF_SERVICES)
def test_the_failure_of_a_service_is_enough_to_shrink(service: str) -> None:
    """Its error names shrink(): that works, though other calls would."""
    call = _OF_SERVICES[service]
    failed = threading.Barrier(3)

    def main(comm: Communicator) -> float:
        comm.timeout_s = 300
        call(comm)
        failed.wait()
        if comm.rank == 0:
            for channel in core_of(comm).privates:
                channel.set_failure("the test breaks it")
        failed.wait()
        with pytest.raises(RevokedError, match=r"the test breaks it"):
            call(comm)
        made = comm.shrink()
        comm.free()
        call(made)
        return _sum(made)

    assert local.run(3, main) == [7.0] * 3


def test_wrong_calls_say_what_is_wrong() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=r"has not failed.*call revoke\(\) first"):
            comm.shrink()
        with pytest.raises(UsageError, match=r"flag='x' must be an integer"):
            comm.agree("x")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="of 64 bits"):
            comm.agree(2**63)
        with pytest.raises(UsageError, match=r"why=7 must be a text"):
            comm.revoke(7)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="timeout_s"):
            comm.agree(1, timeout_s=-1)
        assert _sum(comm) == 3.0
        comm.revoke()
        with pytest.raises(UsageError, match="name"):
            comm.shrink(name=5)  # type: ignore[arg-type]
        comm.revoke()  # once more: nothing happens
        made = comm.shrink()
        comm.free()
        for call in (comm.revoke, comm.agree, comm.shrink):
            with pytest.raises(ClosedError):
                call()
        assert _sum(made) == 3.0

    local.run(2, main)


def test_a_rank_that_does_not_come_is_named_and_met_later() -> None:
    def main(comm: Communicator) -> float:
        comm.revoke()
        if comm.rank != 1:
            words = "rank 1 neither came nor ended"
            with pytest.raises(TimeoutError_, match=words):
                comm.shrink(timeout_s=0.1)
        gave_up.wait()
        return _sum(comm.shrink(timeout_s=300))

    gave_up = threading.Barrier(3, timeout=300)
    assert local.run(3, main) == [7.0] * 3


def test_nothing_of_the_old_one_is_left_in_its_world() -> None:
    def main(comm: Communicator) -> None:
        old = core_of(comm).world
        for _ in range(3):
            comm.revoke()
            made = comm.shrink()
            comm.free()
            assert core_of(made).world is not old
            assert core_of(made).world.engine is old.engine
            comm = made
        assert _sum(comm) == 3.0
        assert old.engine.idle
        comm.free()

    local.run(2, main)
