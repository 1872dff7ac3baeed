# SPDX-License-Identifier: Apache-2.0
"""All ranks in one thread, stepped in an order drawn from the seed: no luck here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from commrt.errors import MismatchError, UsageError
from commrt.local import LocalRanks

MOST_STEPS = 200_000


def step_until_done(
    ranks: LocalRanks, requests: list[list[Any]], rng: random.Random
) -> None:
    """Step ranks in random order, some far more often than others, to the end."""
    size = len(ranks.comms)
    for _ in range(MOST_STEPS):
        if all(request.done for row in requests for request in row):
            return
        favourite = rng.randrange(size)
        for _ in range(rng.choice([1, 1, 2, 30])):
            ranks.step(favourite)
    pytest.fail(f"not done after {MOST_STEPS} turns: {requests}")


def test_nothing_happens_between_steps() -> None:
    with LocalRanks(2) as ranks:
        x = [np.full(50_000, 1.0 + rank) for rank in range(2)]
        requests = [
            comm.allreduce(x[comm.rank], nonblocking=True, algorithm="ring")
            for comm in ranks.comms
        ]
        assert [request.done for request in requests] == [False, False]
        assert ranks.step(0)
        assert not requests[1].done
        step_until_done(ranks, [requests], random.Random(0))
        assert all((request.wait() == 3.0).all() for request in requests)


LANES = 8
"""Operations with payload in flight; native/engine/layout.hpp."""


def test_an_operation_starts_at_once_beside_others_in_flight() -> None:
    how: dict[str, Any] = {"nonblocking": True, "algorithm": "direct"}
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        x = [[np.full(1024, 1.0 + rank) for _ in range(LANES + 2)] for rank in (0, 1)]
        sent = [first.allreduce(each, **how) for each in x[0]]
        met = [second.allreduce(each, **how) for each in x[1]]
        assert not any(request.done for request in sent)
        # What the other rank sent is there; the last two wait for memory to send from.
        assert [request.done for request in met] == [True] * LANES + [False] * 2
        # A short one needs none, and what waits for it is not overtaken by a long one.
        short = [comm.allreduce(np.ones(2), **how) for comm in ranks.comms]
        assert [request.done for request in short] == [False, True]
        late = [comm.allreduce(np.ones(1024), **how) for comm in ranks.comms]
        step_until_done(ranks, [sent, met, short, late], random.Random(0))
        for request in (*sent, *met):
            assert (request.wait() == 3.0).all()
        assert all((request.wait() == 2.0).all() for request in (*short, *late))


SLICE_NBYTES = 256 * 1024
"""More than a call may do of an operation, in bytes; far less than all of it."""


def test_a_nonblocking_call_does_a_slice_of_its_work() -> None:
    x = np.ones(1 << 19)
    with LocalRanks(1) as ranks:
        out = np.zeros_like(x)
        request = ranks.comms[0].allreduce(x, out=out, nonblocking=True)
        assert 0 < np.count_nonzero(out) * 8 <= SLICE_NBYTES
        # So does every look, and every step.
        for advance in (request.test, lambda: ranks.step(0)):
            before = np.count_nonzero(out)
            advance()
            assert 0 < (np.count_nonzero(out) - before) * 8 <= SLICE_NBYTES
        assert request.wait().all()


def test_operations_in_flight_take_turns() -> None:
    with LocalRanks(1) as ranks:
        outs = [np.zeros(1 << 19) for _ in range(3)]
        requests = [
            ranks.comms[0].allreduce(np.ones(1 << 19), out=out, nonblocking=True)
            for out in outs
        ]
        for _ in range(4):
            ranks.step(0)
        done = [np.count_nonzero(out) * 8 for out in outs]
        assert min(done) > 0
        assert max(done) - min(done) <= 2 * SLICE_NBYTES
        step_until_done(ranks, [requests], random.Random(0))
        assert all(request.wait().all() for request in requests)


def test_what_can_be_sent_at_once_is_sent_slice_by_slice() -> None:
    params = {"chunk": 65536, "depth": 64, "reuse": 64}
    with LocalRanks(2) as ranks:
        x = [np.full(1 << 19, 1.0 + rank) for rank in range(2)]
        requests = [
            ranks.comms[0].allreduce(
                x[0], nonblocking=True, algorithm="ring", params=params
            )
        ]
        # Half of the array can be on its way before rank 1 has called.
        steps = 0
        while ranks.step(0):
            steps += 1
        assert steps >= x[0].nbytes // 2 // SLICE_NBYTES - 1
        requests.append(
            ranks.comms[1].allreduce(
                x[1], nonblocking=True, algorithm="ring", params=params
            )
        )
        step_until_done(ranks, [requests], random.Random(0))
        assert all((request.wait() == 3.0).all() for request in requests)


def test_the_mean_of_long_integers_is_divided_slice_by_slice() -> None:
    with LocalRanks(2) as ranks:
        x = [np.arange(200_000) * (1 + 2 * rank) for rank in range(2)]
        requests = [
            [comm.allreduce(x[comm.rank], op="avg", nonblocking=True)]
            for comm in ranks.comms
        ]
        step_until_done(ranks, requests, random.Random(0))
        for (request,) in requests:
            assert np.array_equal(request.wait(), np.arange(200_000) * 2)


def test_a_rank_that_is_never_stepped_holds_the_others_up() -> None:
    with LocalRanks(3) as ranks:
        x = [np.ones(4) for _ in range(3)]
        requests = [
            comm.allreduce(x[comm.rank], nonblocking=True) for comm in ranks.comms[:2]
        ]
        for _ in range(1000):
            ranks.step(0)
            ranks.step(1)
        assert not any(request.done for request in requests)
        requests.append(ranks.comms[2].allreduce(x[2], nonblocking=True))
        step_until_done(ranks, [requests], random.Random(0))
        assert [request.wait()[0] for request in requests] == [3.0] * 3


def test_lengths_that_differ_are_found_by_the_engine() -> None:
    ranks = LocalRanks(2)
    requests = [
        comm.allreduce(
            np.ones(4 + comm.rank), nonblocking=True, algorithm="recursive_doubling"
        )
        for comm in ranks.comms
    ]
    step_until_done(ranks, [requests], random.Random(0))
    for request in requests:
        with pytest.raises(MismatchError, match="another length") as first:
            request.wait()
        with pytest.raises(MismatchError) as second:
            request.wait()
        assert second.value is first.value


def test_lengths_that_differ_by_millions_are_found_by_the_engine() -> None:
    # One fragment each, so that only the lengths of the messages differ.
    ranks = LocalRanks(2)
    requests = [
        comm.bcast(
            np.ones((1 + 2 * comm.rank) << 20, np.uint8),
            nonblocking=True,
            algorithm="direct",
            params={"chunk": 3 << 20},
        )
        for comm in ranks.comms
    ]
    step_until_done(ranks, [requests], random.Random(0))
    requests[0].wait()
    with pytest.raises(MismatchError, match="another length"):
        requests[1].wait()


def test_an_operation_behind_a_failed_one_ends_with_it() -> None:
    ranks = LocalRanks(2)
    first, second = ranks.comms
    how: dict[str, Any] = {"nonblocking": True, "algorithm": "recursive_doubling"}
    failing = [first.allreduce(np.ones(4), **how)]
    behind = first.allreduce(np.ones(4), **how)
    failing.append(second.allreduce(np.ones(5), **how))
    step_until_done(ranks, [failing, [behind]], random.Random(0))
    for request in failing:
        with pytest.raises(MismatchError, match="another length"):
            request.wait()
    with pytest.raises(MismatchError, match=r"^allreduce #0 .* another length"):
        behind.wait()


def test_calls_that_exchange_run_on_all_ranks_at_once() -> None:
    with LocalRanks(4) as ranks:
        halves = ranks.each(lambda comm: comm.split(comm.rank % 2))
        assert [half.size for half in halves if half is not None] == [2] * 4
        requests = []
        for half in halves:
            assert half is not None
            requests.append(half.allgather(np.array([half.rank]), nonblocking=True))
        step_until_done(ranks, [requests], random.Random(0))
        assert all(r.wait().reshape(-1).tolist() == [0, 1] for r in requests)
        for half in halves:
            assert half is not None
            half.free()


def test_communicator_with_operations_in_flight_cannot_be_freed() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        pending = first.allreduce(np.ones(3), nonblocking=True)
        with pytest.raises(UsageError, match="operations are in flight; wait"):
            first.free()
        other = second.allreduce(np.ones(3), nonblocking=True)
        step_until_done(ranks, [[pending, other]], random.Random(0))
        assert pending.wait()[0] == other.wait()[0] == 2.0
        again = [comm.allreduce(np.ones(3), nonblocking=True) for comm in ranks.comms]
        step_until_done(ranks, [again], random.Random(0))
        assert [request.wait()[0] for request in again] == [2.0, 2.0]
