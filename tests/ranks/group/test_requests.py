# SPDX-License-Identifier: Apache-2.0
"""Requests: waiting, testing, failing, and being dropped."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import core_of
from commrt.errors import MismatchError, RevokedError, TimeoutError_, UsageError
from commrt.group.stepped import SteppedRequest
from commrt.local import LocalRanks, run
from commrt.request import RequestErrors, test_all, wait_all, wait_any

# Not a test, whatever pytest thinks of its name.
test_all.__test__ = False  # type: ignore[attr-defined]


def finish(ranks: LocalRanks, *requests: Any) -> None:
    """Step all ranks until the requests are done."""
    for _ in range(100_000):
        if all(request.done for request in requests):
            return
        for rank in range(len(ranks.comms)):
            ranks.step(rank)
    pytest.fail(f"not done: {requests}")


def start(ranks: LocalRanks, number: int = 3) -> list[Any]:
    """Start one allreduce per rank."""
    return [
        comm.allreduce(np.full(number, 1.0 + comm.rank), nonblocking=True)
        for comm in ranks.comms
    ]


def test_wait_returns_the_same_output_every_time() -> None:
    with LocalRanks(2) as ranks:
        out = np.zeros(3)
        first = ranks.comms[0].allreduce(np.ones(3), out=out, nonblocking=True)
        second = ranks.comms[1].allreduce(np.ones(3), nonblocking=True)
        finish(ranks, first, second)
        assert first.wait() is out
        assert first.wait() is out
        assert first.synchronize() is out
        assert first.test()
        assert second.wait().tolist() == [2.0] * 3


def test_request_describes_itself() -> None:
    with LocalRanks(2) as ranks:
        requests = start(ranks)
        assert repr(requests[0]) == "<commrt.Request allreduce #0 on local: pending>"
        assert (requests[0].operation, requests[0].seq) == ("allreduce", 0)
        assert (requests[0].received_nbytes, requests[0].source) == (-1, -1)
        assert (requests[0].device, requests[0].stream) == (None, None)
        finish(ranks, *requests)
        assert repr(requests[1]) == "<commrt.Request allreduce #0 on local: done>"
        wait_all(requests)


def test_truth_of_a_request_is_refused() -> None:
    with LocalRanks(1) as ranks:
        request = ranks.comms[0].barrier(nonblocking=True)
        with pytest.raises(
            TypeError, match=r"not its completion: call test\(\) or wait"
        ):
            bool(request)
        assert request.wait() is None


def test_wait_refuses_streams_and_times_that_make_no_sense() -> None:
    with LocalRanks(2) as ranks:
        requests = start(ranks)
        with pytest.raises(
            UsageError, match=r"wait\(stream=\.\.\.\) is for device arrays"
        ):
            requests[0].wait(stream=7)
        for timeout_s in (-1, 0, "1", float("nan")):
            with pytest.raises(
                UsageError, match=r"allreduce #0 .*timeout_s=.* above 0"
            ):
                requests[0].wait(timeout_s=timeout_s)
            with pytest.raises(UsageError, match="wait_all: timeout_s="):
                wait_all(requests, timeout_s=timeout_s)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="wait_any: timeout_s="):
                wait_any(requests, timeout_s=timeout_s)  # type: ignore[arg-type]
        finish(ranks, *requests)
        assert wait_all(requests)[0].tolist() == [3.0] * 3


def test_wait_any_returns_the_one_that_is_complete() -> None:
    with LocalRanks(2) as ranks:
        a, b = ranks.comms
        never = a.recv(np.zeros(1), source=1, tag=1, nonblocking=True)
        done = a.recv(np.zeros(1), source=1, tag=2, nonblocking=True)
        b.send(np.full(1, 5.0), dest=0, tag=2)
        index, out = wait_any([never, done])
        assert (index, out.tolist()) == (1, [5.0])
        with pytest.raises(TimeoutError_, match="none of 1 requests was complete"):
            wait_any([never], timeout_s=0.01)
        with pytest.raises(UsageError, match="no requests given"):
            wait_any([])
        assert not test_all([never, done])
        b.send(np.full(1, 6.0), dest=0, tag=1)
        assert test_all([never, done])
        assert never.wait().tolist() == [6.0]


def failed_pair() -> tuple[LocalRanks, list[Any]]:
    """Return ranks whose allreduce failed because their lengths differ."""
    ranks = LocalRanks(2)
    requests = [
        comm.allreduce(np.ones(3 + comm.rank), nonblocking=True) for comm in ranks.comms
    ]
    finish(ranks, *requests)
    return ranks, requests


def test_failure_is_the_same_object_every_time() -> None:
    _, requests = failed_pair()
    with pytest.raises(MismatchError) as first:
        requests[0].wait()
    with pytest.raises(MismatchError) as again:
        requests[0].test()
    assert again.value is first.value
    assert "failed" in repr(requests[0])
    with pytest.raises(MismatchError):
        requests[1].wait()


def test_wait_all_raises_one_failure_as_it_is_and_several_together() -> None:
    _, requests = failed_pair()
    with LocalRanks(2) as others:
        good = start(others)
        finish(others, *good)
        with pytest.raises(MismatchError):
            wait_all([good[0], requests[0]])
        with pytest.raises(
            RequestErrors, match="2 requests failed:\n  request 0:"
        ) as all_:
            wait_all([requests[0], good[1], requests[1]])
        assert [index for index, _ in all_.value.errors] == [0, 2]


@pytest.mark.parametrize("observed", [True, False])
def test_a_failed_communicator_refuses_further_use(observed: bool) -> None:
    ranks = LocalRanks(2)
    comm = ranks.comms[0]
    # In the dispatcher's cache, so that the quick way must notice too.
    warm = start(ranks)
    finish(ranks, *warm)
    wait_all(warm)
    requests = [
        each.allreduce(np.ones(3 + each.rank), nonblocking=True) for each in ranks.comms
    ]
    finish(ranks, *requests)
    if observed:
        with pytest.raises(MismatchError):
            requests[0].wait()
    for call in (
        lambda: comm.allreduce(np.ones(3)),
        lambda: comm.send(np.ones(3), dest=1),
        lambda: comm.dup(),
    ):
        with pytest.raises(MismatchError, match=r"^allreduce #\d on .*another length"):
            call()
    for request in requests:
        with pytest.raises(MismatchError):
            request.wait()


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_waited_requests_go_quietly() -> None:
    with LocalRanks(2) as ranks:
        requests = start(ranks)
        finish(ranks, *requests)
        wait_all(requests)
        del requests
        gc.collect()


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_what_a_failed_operation_of_several_steps_waited_for_goes_quietly() -> None:
    ranks = LocalRanks(2)
    comm = ranks.comms[0]

    def steps() -> Any:
        yield [comm.allreduce(np.ones(3), nonblocking=True) for _ in range(2)]

    errors: list[Any] = []
    request = SteppedRequest(steps(), "two sums", "sum", 60.0, errors.append)
    assert not request.test()
    request.give_up("nobody comes")
    with pytest.raises(RevokedError, match="two sums: nobody comes"):
        request.wait()
    assert len(errors) == 1
    del request, errors
    gc.collect()


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_sparse_sum_that_is_given_up_says_nothing_of_its_messages() -> None:
    ranks = LocalRanks(2)
    x = np.array([1, 3]), np.ones(2), (100,)
    how: Any = {"algorithm": "recursive_doubling"}
    ranks.each(lambda comm: comm.sparse_allreduce(x, **how))  # what is made once
    first, second = (
        comm.sparse_allreduce(x, **how, nonblocking=True) for comm in ranks.comms
    )
    for _ in range(200):
        first.test()
    for request in (first, second):
        request.give_up("nobody goes on")
        with pytest.raises(RevokedError, match="nobody goes on"):
            request.wait()
    del first, second, request
    gc.collect()


def test_dropped_request_warns_and_its_buffers_outlive_it() -> None:
    with LocalRanks(2) as ranks:
        alive: list[weakref.ref[Any]] = []

        def start_and_drop() -> None:
            x, out = np.full(50_000, 1.0), np.zeros(50_000)
            alive.extend([weakref.ref(x), weakref.ref(out)])
            ranks.comms[0].allreduce(x, out=out, nonblocking=True)

        with pytest.warns(ResourceWarning, match="allreduce #0 on local was dropped"):
            start_and_drop()
        gc.collect()
        assert all(ref() is not None for ref in alive)
        # Whoever gets freed memory of that size now would see it overwritten.
        poison = [np.full(50_000, 77.0) for _ in range(8)]
        x = np.full(50_000, 2.0)
        other = ranks.comms[1].allreduce(x, nonblocking=True)
        for _ in range(10_000):
            ranks.step(0)
            ranks.step(1)
            if other.done and core_of(ranks.comms[0]).idle:
                break
        assert other.wait()[0] == 3.0
        dropped = alive[1]()
        assert dropped is not None
        assert dropped[-1] == 3.0
        assert all((each == 77.0).all() for each in poison)
        del dropped
        # Ended references are dropped by the next call.
        last = start(ranks)
        finish(ranks, *last)
        wait_all(last)
        gc.collect()
        assert all(ref() is None for ref in alive)


def test_timeout_of_a_request_leaves_it_waitable() -> None:
    with LocalRanks(2) as ranks:
        request = ranks.comms[0].allreduce(np.ones(3), nonblocking=True)
        for _ in range(2):
            with pytest.raises(
                TimeoutError, match="allreduce #0 on local, rank 0"
            ) as e:
                request.wait(timeout_s=0.01)
            assert isinstance(e.value, TimeoutError_)
            assert "rank 1 on this node has not started it" in str(e.value)
            assert e.value.request is request  # type: ignore[attr-defined]
        other = ranks.comms[1].allreduce(np.ones(3), nonblocking=True)
        finish(ranks, request, other)
        assert wait_all([request, other])[0].tolist() == [2.0] * 3


def test_timeout_of_a_blocking_call_hands_the_request_over() -> None:
    def rank_main(comm: Any) -> float:
        if comm.rank == 0:
            with pytest.raises(TimeoutError_, match=r"allreduce #0 .* rank") as raised:
                comm.allreduce(np.ones(3), timeout_s=0.05)
            names = "ranks 1, 2 on this node have not started it"
            assert names in str(raised.value)
            core_of(comm).world.meet(range(3), "late")
            result = raised.value.request.wait()  # type: ignore[attr-defined]
        else:
            core_of(comm).world.meet(range(3), "late")
            result = comm.allreduce(np.ones(3))
        return float(result[0] + comm.allreduce(np.ones(1))[0])

    assert run(3, rank_main, timeout_s=300) == [6.0] * 3


def test_hundreds_in_flight_are_waited_for_in_any_order(seed: int) -> None:
    def rank_main(comm: Any) -> list[float]:
        rng = random.Random(f"{seed} {comm.rank}")
        arrays = [np.full(1 + 37 * i % 5000, float(i)) for i in range(300)]
        requests = [comm.allreduce(array, nonblocking=True) for array in arrays]
        for index in rng.sample(range(300), 300):
            assert requests[index].wait() is arrays[index]
        return [float(array[-1]) for array in arrays]

    expected = [3.0 * i for i in range(300)]
    assert run(3, rank_main, timeout_s=300) == [expected] * 3


def test_public_names() -> None:
    assert commrt.wait_all is wait_all
    assert commrt.wait_any is wait_any


def test_a_wait_looks_as_often_as_the_least_of_what_is_in_flight_says() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        by_links = core_of(first).least_spins

        def start(comm: Any, spins: int | str) -> Any:
            way = f"direct{{spins={spins}}}"
            return comm.allreduce(np.ones(3), algorithm=way, nonblocking=True)

        started = []
        for spins, looks in ((300, 300), (7, 7), (40, 7), ("auto", 7)):
            started.append(start(first, spins))
            assert core_of(first).least_spins == min(looks, by_links)
        started += [start(second, spins) for spins in (300, 7, 40, "auto")]
        finish(ranks, *started)
        assert core_of(first).least_spins == by_links
        wait_all(started)


@pytest.mark.parametrize("spins", [0, 1, 5000])
def test_who_does_not_spin_gets_the_same(spins: int) -> None:
    way = f"local/direct{{spins={spins}}}"

    def main(comm: Any) -> list[float]:
        short, long = np.ones(3), np.ones(100_000)
        comm.allreduce(short, algorithm=way)
        request = comm.allreduce(long, algorithm=way, nonblocking=True)
        plan = comm.plan.allreduce(short, algorithm=way)
        request.wait()
        plan()
        return [float(short[-1]), float(long[-1])]

    assert run(3, main) == [[9.0, 3.0]] * 3
