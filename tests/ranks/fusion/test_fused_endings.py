# SPDX-License-Identifier: Apache-2.0
"""However a fused() ends, its requests are settled, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import core_of
from commrt.core import Core
from commrt.errors import (
    CommError,
    MismatchError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.fusion import agreement as fusion_agreement
from commrt.local import LocalRanks, run

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


def one(count: int = 3) -> Any:
    return np.ones(count)


# -- leaving ---------------------------------------------------------------------------


def check_it_is_over(comm: Any, requests: list[Any], cause: str) -> None:
    """Check that the rank has errors to show, and nothing in flight."""
    for request in requests:
        assert request.done
        for _ in range(2):
            with pytest.raises(RevokedError, match=cause):
                request.wait()
            with pytest.raises(RevokedError, match=cause):
                request.test()
    core_of(comm).world.engine.step()  # takes out what has failed
    assert core_of(comm).idle
    for call in (comm.allreduce, lambda x: comm.recv(x, source=0)):
        with pytest.raises(RevokedError, match="failed in an earlier operation"):
            call(one())
    with pytest.raises(RevokedError):
        comm.fused()


@pytest.mark.parametrize("early", [0, 1])
def test_a_time_out_while_leaving_ends_all_calls(early: int) -> None:
    with LocalRanks(2) as ranks:
        first, last = ranks.comms[early], ranks.comms[1 - early]
        first.timeout_s = 0.01
        requests = []
        with (
            pytest.raises(TimeoutError_, match="same 2 calls and left the context"),
            first.fused(time_limit_s=60),
        ):
            requests = [first.allreduce(one(), nonblocking=True) for _ in range(2)]
        check_it_is_over(first, requests, r"left the calls unsent by TimeoutError_: ")
        # Who comes later need not wait for its own deadline; here, or for its requests.
        late = []
        with (
            contextlib.suppress(RevokedError),
            last.fused(time_limit_s=60),
        ):
            late = [last.allreduce(one(), nonblocking=True) for _ in range(2)]
        for request in late:
            with pytest.raises(RevokedError, match="gave up"):
                request.wait()
        check_it_is_over(last, late, "gave up")


@pytest.mark.parametrize("early", [0, 1])
def test_an_exception_that_the_others_do_not_follow_ends_all_calls(early: int) -> None:
    class Stop(Exception):  # noqa: N818
        pass

    with LocalRanks(2) as ranks:
        comm = ranks.comms[early]
        comm.timeout_s = 0.01
        requests = []

        def stops() -> None:
            with comm.fused(time_limit_s=60):
                requests.append(comm.allreduce(one(), nonblocking=True))
                raise Stop("enough")

        with pytest.raises(Stop):
            stops()
        check_it_is_over(comm, requests, r"left the calls unsent by Stop: enough")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_while_leaving_ends_all_calls(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, seconds: float) -> None:
        raise KeyboardInterrupt

    for kind in (fusion_agreement.Leader, fusion_agreement.Follower):
        monkeypatch.setattr(kind, "_wait", interrupted)
    with LocalRanks(2) as ranks:
        comm = ranks.comms[rank]
        requests = []
        with pytest.raises(KeyboardInterrupt), comm.fused(time_limit_s=60):
            requests = [comm.allreduce(one(), nonblocking=True)]
        check_it_is_over(comm, requests, "left the calls unsent by KeyboardInterrupt")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_communicator_that_is_given_up_ends_calls_with_a_time_limit(
    rank: int,
) -> None:
    """At once, not by their deadline."""
    with LocalRanks(2) as ranks:
        comm = ranks.comms[rank]
        with comm.fused(time_limit_s=60):
            requests = [comm.allreduce(one(), nonblocking=True) for _ in range(2)]
            core_of(comm).give_up("enough")
            with pytest.raises(RevokedError, match="enough"):
                requests[0].wait()
        check_it_is_over(comm, requests, "enough")
        other = ranks.comms[1 - rank]
        with contextlib.suppress(RevokedError), other.fused(time_limit_s=60):
            requests = [other.allreduce(one(), nonblocking=True)]
        with pytest.raises(RevokedError, match="gave up"):
            requests[0].wait()


def test_a_call_that_comes_while_the_context_is_left_fails() -> None:
    """It would not be sent any more."""
    with LocalRanks(2) as ranks:
        comm = ranks.comms[0]
        with comm.fused(time_limit_s=60) as context:
            request = comm.allreduce(one(), nonblocking=True)
            context.agreement._is_over = True  # type: ignore[union-attr]
        check_it_is_over(comm, [request], "made while the context was left")


def test_no_receive_is_left_where_ranks_disagree() -> None:
    with LocalRanks(3) as ranks:
        requests = []
        agreements = []
        for comm, count in zip(ranks.comms, (4, 5), strict=False):
            agreements.append(comm.fused(time_limit_s=60).__enter__().agreement)
            requests.append(comm.allreduce(one(count), nonblocking=True))
        agreements[1].look()
        # Rank 0 waits for what rank 2 says, too.
        for request in (lambda: agreements[0].look(), requests[0].wait):
            with pytest.raises(MismatchError, match="rank 1 did not make the calls"):
                request()
        assert core_of(ranks.comms[0]).idle
        with pytest.raises(MismatchError, match="rank 1 did not make the calls"):
            requests[1].wait()
        for comm in ranks.comms[:2]:
            core_of(comm).fusion.context.__exit__(None, None, None)


# -- buckets that are not sent ---------------------------------------------------------


def test_a_bucket_that_fails_while_giving_up_fails_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Any, *args: Any) -> None:
        raise RuntimeError("broken")

    def rank_main(comm: Any) -> list[str]:
        if comm.rank == 0:
            core_of(comm).fusion.plan_bucket = lambda *args: broken(comm)
            core_of(comm).give_up = lambda why: broken(comm)
        said = []
        for _ in range(2):
            try:
                with comm.fused():
                    request = comm.allreduce(one(), nonblocking=True)
                request.wait()
            except (RuntimeError, RevokedError) as error:
                said.append(type(error).__name__)
        return said

    found = run(2, rank_main, timeout_s=300)
    assert found == [["RuntimeError", "RevokedError"], ["RevokedError"] * 2]


def refusing(comm: Any, limit: int) -> None:
    """Let nothing run allreduces of so many elements and more."""
    asked = core_of(comm).selection.asked

    def refuse(call: Any, bound: Any) -> Any:
        if bound.num_elements >= limit:
            raise UsageError(f"nothing runs {bound.num_elements} elements")
        return asked(call, bound)

    core_of(comm).selection.asked = refuse


@pytest.mark.parametrize("limit", [None, 60.0])
def test_what_cannot_run_is_settled_by_the_buckets_length(limit: float | None) -> None:
    """Equal on all ranks, so the communicator stays as good as it was."""

    def rank_main(comm: Any) -> list[float]:
        refusing(comm, 10)
        with comm.fused(time_limit_s=limit):
            requests = [comm.allreduce(one(4), nonblocking=True) for _ in range(3)]
        for request in requests:
            with pytest.raises(UsageError, match="nothing runs 12 elements"):
                request.wait()
        with comm.fused(time_limit_s=limit):
            requests = [comm.allreduce(one(4), nonblocking=True) for _ in range(2)]
        return [each[0] for each in commrt.wait_all(requests)]

    assert run(2, rank_main) == [[2.0, 2.0]] * 2


def test_what_only_a_bucket_can_run_is_taken() -> None:
    def rank_main(comm: Any) -> list[float]:
        asked = core_of(comm).selection.asked

        def refuse(call: Any, bound: Any) -> Any:
            if bound.num_elements < 8:
                raise UsageError("too short")
            return asked(call, bound)

        core_of(comm).selection.asked = refuse
        with comm.fused():
            requests = [comm.allreduce(one(4), nonblocking=True) for _ in range(2)]
        return [each[0] for each in commrt.wait_all(requests)]

    assert run(2, rank_main) == [[2.0, 2.0]] * 2


# -- requests --------------------------------------------------------------------------


def test_wait_all_waits_for_a_timeout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Any] = []
    timed_out = Core.timed_out

    def counted(self: Any, *args: Any) -> Any:
        late.append(args)
        return timed_out(self, *args)

    monkeypatch.setattr(Core, "timed_out", counted)
    with LocalRanks(2) as ranks:
        comm, other = ranks.comms
        comm.timeout_s = 0.01
        with comm.fused():
            requests = [comm.allreduce(one(), nonblocking=True) for _ in range(2)]
        with pytest.raises(commrt.request.RequestErrors, match="2 requests failed"):
            commrt.wait_all(requests)
        assert len(late) == 2
        with other.fused():
            requests += [other.allreduce(one(), nonblocking=True) for _ in range(2)]
        while not all(each.done for each in requests):
            ranks.step(0)
            ranks.step(1)
        assert [each[0] for each in commrt.wait_all(requests)] == [2.0] * 4


def test_a_request_that_the_list_loses_meanwhile_is_waited_for() -> None:
    """As another thread may change the list while the GIL is free."""

    def rank_main(comm: Any) -> list[float]:
        with comm.fused(time_limit_s=60):
            requests = [comm.allreduce(one(), nonblocking=True) for _ in range(9)]
            others = requests[1:]
            await_cut = core_of(comm).fusion.await_cut

            def loses(call: int, seconds: float) -> None:
                del core_of(comm).fusion.await_cut
                requests.clear()
                # In the memory of what is gone.
                others.append(comm.allreduce(one(), nonblocking=True))
                await_cut(call, seconds)

            core_of(comm).fusion.await_cut = loses
            results = commrt.wait_all(requests)
        assert len(results) == 1
        return [each[0] for each in (*results, *commrt.wait_all(others))]

    assert run(2, rank_main) == [[2.0] * 10] * 2


def test_what_test_raised_is_not_lost() -> None:
    with LocalRanks(2) as ranks, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        comm = ranks.comms[0]
        with contextlib.suppress(RevokedError), comm.fused(time_limit_s=60):
            request = comm.allreduce(one(), nonblocking=True)
            core_of(comm).fusion.await_cut = lambda call, seconds: core_of(
                comm
            ).check_usable()
            core_of(comm).give_up("enough")
            with pytest.raises(RevokedError, match="enough"):
                request.test()
            del request
            gc.collect()
            del core_of(comm).fusion.await_cut
        assert [str(each.message) for each in warned] == []


def test_an_interrupt_leaves_a_bucket_that_has_started() -> None:
    """It comes of another operation's reduction, in the call that sends the bucket."""
    raising = threading.Event()

    def interrupted(a: Any, b: Any) -> Any:
        if raising.is_set():
            raise KeyboardInterrupt
        return a + b

    with LocalRanks(2) as ranks:
        others = ranks.each(lambda comm: comm.dup())
        mine = commrt.reduction(interrupted, commutative=True)
        how = {"op": mine, "algorithm": "direct", "nonblocking": True}
        pending = [comm.allreduce(one(), **how) for comm in (*others, *others)]
        raising.set()
        # Both of rank 0 want the function; one of them is left wanting it.
        with pytest.raises(KeyboardInterrupt):
            pending[0].test()
        sending = ranks.comms[0].fused()
        sending.__enter__()
        out = np.zeros(30_000)
        requests = [ranks.comms[0].allreduce(one(30_000), out=out, nonblocking=True)]
        with pytest.raises(KeyboardInterrupt):
            sending.__exit__(None, None, None)
        assert requests[0].seq == 0
        raising.clear()
        with ranks.comms[1].fused():
            requests.append(ranks.comms[1].allreduce(one(30_000), nonblocking=True))
        while not all(each.done for each in requests):
            ranks.step(0)
            ranks.step(1)
        assert [each[-1] for each in commrt.wait_all(requests)] == [2.0, 2.0]
        assert requests[0].wait() is out
        for request in pending:
            with contextlib.suppress(CommError):
                request.wait()
