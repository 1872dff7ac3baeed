# SPDX-License-Identifier: Apache-2.0
"""The progress thread: it moves what nobody waits for, and parks otherwise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commrt.comm import core_of
from commrt.errors import TimeoutError_
from commrt.job import world
from commrt.local import run

DEADLINE_S = 300.0


def until(condition: Callable[[], bool]) -> None:
    """Wait without any call that makes progress."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        os.sched_yield()


def is_done(request: Any) -> bool:
    """Look, without progress."""
    return bool(request.done)


def with_thread(rank_main: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run ``rank_main`` with a progress thread for its rank."""

    def main(comm: Any) -> None:
        engine = core_of(comm).world.engine
        engine.start_thread()
        try:
            rank_main(comm)
        finally:
            engine.stop_thread()

    return main


@pytest.mark.parametrize("size", [2, 3])
def test_operations_end_while_nobody_waits_for_them(size: int) -> None:
    def rank_main(comm: Any) -> None:
        x = [np.full(n, 1.0 + comm.rank) for n in (3, 1000, 1 << 18)]
        requests = [comm.allreduce(each, nonblocking=True) for each in x]
        until(lambda: all(request.done for request in requests))
        assert all((each == size * (size + 1) / 2).all() for each in x)
        assert all(request.wait() is x[i] for i, request in enumerate(requests))

    run(size, with_thread(rank_main), timeout_s=300)


def test_the_thread_parks_when_idle_and_wakes_for_the_next_operation() -> None:
    def rank_main(comm: Any) -> None:
        engine = core_of(comm).world.engine
        for _ in range(20):
            until(lambda: engine.is_parked)
            request = comm.allreduce(np.ones(50_000), nonblocking=True)
            until(partial(is_done, request))
            assert request.wait()[-1] == 2.0

    run(2, with_thread(rank_main), timeout_s=300)


def test_the_thread_takes_over_what_a_call_gave_up_waiting_for() -> None:
    def rank_main(comm: Any) -> None:
        engine = core_of(comm).world.engine
        until(lambda: engine.is_parked)
        if comm.rank == 1:
            core_of(comm).world.meet(range(2), "rank 0 has given up")
            assert comm.allreduce(np.ones(50_000))[-1] == 2.0
            return
        with pytest.raises(TimeoutError_) as raised:
            comm.allreduce(np.ones(50_000), timeout_s=0.05)
        core_of(comm).world.meet(range(2), "rank 0 has given up")
        request = raised.value.request  # type: ignore[attr-defined]
        until(partial(is_done, request))
        assert request.wait()[-1] == 2.0

    run(2, with_thread(rank_main), timeout_s=300)


@pytest.mark.parametrize(
    ("cores", "bound_to", "thread"),
    [(2, 2, False), (3, 3, False), (4, 2, True), (4, 1, False), (8, 8, True)],
)
def test_auto_wants_two_cores_per_rank(
    monkeypatch: pytest.MonkeyPatch, cores: int, bound_to: int, thread: bool
) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "auto")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound_to)))
    job: Any = SimpleNamespace(
        nodes=[[0, 1], [2]], size=3, cores=cores, in_process=False, mpi=None
    )
    assert world.progress_mode(job) is thread
    job.in_process = True
    assert world.progress_mode(job) is False


@pytest.mark.parametrize(("mode", "thread"), [("on", True), ("off", False)])
def test_on_and_off_do_not_count_cores(
    monkeypatch: pytest.MonkeyPatch, mode: str, thread: bool
) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", mode)
    job: Any = SimpleNamespace(
        nodes=[[0, 1]], size=2, cores=2, in_process=False, mpi=None
    )
    assert world.progress_mode(job) is thread
