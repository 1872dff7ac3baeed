# SPDX-License-Identifier: Apache-2.0
"""Nonblocking operations of several steps go on beside whatever their rank does."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import numpy as np
import pytest
from relay_ranks import RelayRanks
from stepped_calls import STEPPED_CALLS, expected, sparse, total

from commrt import _native, local
from commrt.comm import Communicator
from commrt.job.stepping import Stepping

LIMIT_S = 240.0
NODES = [[[0, 1]], [[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2, 3, 4]]]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", STEPPED_CALLS)
def test_ranks_may_wait_in_any_order(name: str, nodes: list[list[int]]) -> None:
    size = sum(map(len, nodes))

    def main(comm: Communicator) -> list[float]:
        comm.timeout_s = LIMIT_S
        made = [comm.dup() for _ in range(3)]
        order = [(i + comm.rank) % 3 for i in range(3)]
        requests = {i: STEPPED_CALLS[name](made[i]) for i in order}
        return [total(requests[i].wait()) for i in order]

    with RelayRanks(nodes) as ranks:
        assert ranks.each(main) == [[expected(name, size)] * 3] * size


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", STEPPED_CALLS)
def test_a_rank_may_do_something_else_first(name: str, nodes: list[list[int]]) -> None:
    """Others wait for the operation, and come to the barrier only then."""
    size = sum(map(len, nodes))

    def main(comm: Communicator) -> float:
        comm.timeout_s = LIMIT_S
        request = STEPPED_CALLS[name](comm)
        if comm.rank == 1:
            comm.barrier()
            return total(request.wait())
        found = total(request.wait())
        comm.barrier()
        return found

    with RelayRanks(nodes) as ranks:
        assert ranks.each(main) == [expected(name, size)] * size


def test_without_progress_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")

    def main(comm: Communicator) -> float:
        request = sparse(comm)
        assert "commrt-steps" not in [each.name for each in threading.enumerate()]
        return total(request.wait())

    assert local.run(2, main) == [4.0, 4.0]


def test_an_error_is_raised_to_who_waits() -> None:
    """Rank 1 refuses its call; the thread of rank 0 finds that, and nobody else."""

    def main(comm: Communicator) -> str:
        comm.timeout_s = LIMIT_S
        if comm.rank == 1:
            with pytest.raises(ValueError, match="shape") as raised:
                comm.sparse_allreduce((np.array([0]), np.ones(1), -4))
            comm.barrier()
            return type(raised.value).__name__
        request = sparse(comm)
        comm.barrier()
        while not request.done:  # which makes no progress
            os.sched_yield()
        with pytest.raises(Exception, match="rank 1 has refused") as refused:
            request.wait()
        return refused.type.__name__

    assert local.run(2, main) == ["RefusedError", "UsageError"]


class Operation:
    """Ends at its third look, or raises then."""

    done = False
    is_waited_for = False
    awaited: tuple[()] = ()

    def __init__(self, error: Exception | None = None) -> None:
        self.looks = 0
        self.ended = threading.Event()
        self._error = error

    def go_on(self) -> bool:
        self.looks += 1
        if self.looks < 3:
            return False
        self.ended.set()
        if self._error is not None:
            raise self._error
        return True


def stepping(may_run: bool = True) -> Stepping:
    return Stepping(_native.Engine(), lambda: may_run)


@pytest.mark.parametrize("error", [None, RuntimeError("odd")])
def test_the_thread_looks_until_the_end(error: Exception | None) -> None:
    one = stepping()
    first, second = Operation(error), Operation()
    assert one.keep(first) is first
    one.keep(second)
    assert first.ended.wait(LIMIT_S)
    assert second.ended.wait(LIMIT_S)
    later = one.keep(Operation())
    assert later.ended.wait(LIMIT_S)
    one.close()
    assert first.looks == second.looks == later.looks == 3


def test_an_operation_that_is_dropped_is_not_kept() -> None:
    one, dropped = stepping(), Operation()
    dropped.looks = -(10**9)
    one.keep(dropped)
    reference = weakref.ref(dropped)
    del dropped
    while reference() is not None:
        gc.collect()
    one.close()


def test_nothing_is_kept_where_no_thread_may_run_or_all_is_over() -> None:
    one, ended = stepping(may_run=False), Operation()
    assert one.keep(ended) is ended
    two, done = stepping(), Operation()
    done.done = True
    assert two.keep(done) is done
    two.close()
    assert two.keep(Operation()).looks == 0
    assert ended.looks == done.looks == 0


def test_the_thread_ends_after_a_while() -> None:
    def main(comm: Communicator) -> list[threading.Thread]:
        request = sparse(comm)
        found = [each for each in threading.enumerate() if each.name == "commrt-steps"]
        request.wait()
        return found

    for threads in local.run(2, main):
        assert threads
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
