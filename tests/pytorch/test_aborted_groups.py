# SPDX-License-Identifier: Apache-2.0
"""Groups that are aborted, or fail: pending works, abort hooks, the end after it."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reconfigured_groups import Changing, changing
from run_ranks import RunRanks

from commrt.errors import CommError, PeerFailedError, RevokedError, TimeoutError_

DEADLINE_S = 300.0


def pending(it: Changing) -> None:
    """Works in flight end with errors at once, here and on ranks that wait."""
    group = it.group
    dist.all_reduce(torch.ones(1))
    if it.rank == 0:
        works = [
            dist.irecv(torch.ones(2), group_src=1),
            dist.all_reduce(torch.ones(3), async_op=True),
            dist.all_reduce(torch.ones(100_000), async_op=True),
        ]
        future = works[1].get_future()
        assert not any(work.is_completed() for work in works)
        assert [work.exception() for work in works] == [None] * 3
        it.store.get("waits")
        begun = time.monotonic()
        group.abort()
        for work in works:
            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), RevokedError)
            with pytest.raises(RuntimeError, match="the process group was aborted"):
                work.wait()
        with pytest.raises(RuntimeError):
            future.wait()
        assert time.monotonic() - begun < 240.0  # of a limit of 300
    else:
        if it.rank == 1:
            it.store.set("waits", "1")
        with pytest.raises(RevokedError):
            dist.recv(torch.ones(1), group_src=0)
        assert group.get_error().name == "COMM_ERROR"
    for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier):
        with pytest.raises(CommError):
            call()
    group.abort()
    dist.destroy_process_group()


def aborted_by_torch(it: Changing) -> None:
    """``_abort_process_group``, and then a new default group in the same process."""
    dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()


def hooks_of_an_abort(it: Changing) -> None:
    """Each hook is called once, when calls fail; one that raises is passed over."""
    group, said, called = it.group, [], threading.Event()

    def failing() -> None:
        said.append("failing")
        raise ValueError("of the hook")

    def looking() -> None:
        with pytest.raises(RevokedError):
            dist.all_reduce(torch.ones(1))
        said.append("looking")
        called.set()

    group.register_abort_hook(1, failing)
    group.register_abort_hook(2, lambda: said.append("gone"))
    group.register_abort_hook(2, looking)
    group.register_abort_hook(3, lambda: said.append("unregistered"))
    group.unregister_abort_hook(3)
    group.unregister_abort_hook(4)
    dist.all_reduce(torch.ones(1))
    assert said == []
    it.meet("hooks")
    if it.rank == 0:
        with pytest.warns(
            RuntimeWarning, match="an abort hook of .*(?s:.*)of the hook"
        ):
            group.abort()
        group.abort()
        assert said == ["failing", "looking"]
    else:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(RevokedError):
                dist.recv(torch.ones(1), group_src=0)
            # The thread that watches the work may have been first.
            assert called.wait(240)
        assert "of the hook" in str(warned[0].message)
        assert said == ["failing", "looking"]


def hooks_of_a_timeout(it: Changing) -> None:
    """A timeout that nobody waits for is told; the operation stays in flight."""
    group, told = it.group, threading.Event()
    group.register_abort_hook(0, told.set)
    group.set_timeout(timedelta(seconds=0.5))
    x = torch.ones(4)
    if it.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert told.wait(240)
        assert group.get_error().name == "SUCCESS"
        with pytest.raises(TimeoutError_):
            work.wait()
        it.store.set("told", "1")
        work.wait(timedelta(seconds=300))
    else:
        it.store.get("told")
        dist.all_reduce(x, async_op=True).wait(timedelta(seconds=300))
        assert not told.is_set()
    assert x.tolist() == [float(it.size)] * 4


def a_short_wait(it: Changing) -> None:
    """A wait with a limit of its own says nothing of the group, nor ends it."""
    told: list[int] = []
    it.group.register_abort_hook(0, lambda: told.append(1))
    x = torch.ones(2)
    if it.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(TimeoutError_):
            work.wait(timedelta(seconds=0.02))
        it.store.set("waited", "1")
        work.wait()
    else:
        it.store.get("waited")
        dist.all_reduce(x)
    assert x.tolist() == [float(it.size)] * 2
    assert told == []


Scenario = Callable[[Changing], None]
SCENARIOS: tuple[Scenario, ...] = (
    *(pending, aborted_by_torch, hooks_of_an_abort, hooks_of_a_timeout, a_short_wait),
)


def run_all() -> str:
    for scenario in SCENARIOS:
        with changing(scenario.__name__, enable_reconfigure=False) as it:
            scenario(it)
    return "right"


@pytest.mark.parametrize("nodes", ["", "1"])
def test_aborts_and_hooks(tmp_path: Path, nodes: str) -> None:
    env = {"COMMRT_NODES": nodes} if nodes else {}
    ranks = RunRanks(tmp_path)
    assert ranks(3, run_all, env=env, deadline_s=DEADLINE_S) == ["right"] * 3


def hook_of_a_death() -> list[Any]:
    """A hook hears of a rank that dies, with nobody waiting for the work."""
    with changing("death", enable_reconfigure=False) as it:
        dist.all_reduce(torch.ones(1))
        told = threading.Event()
        it.group.register_abort_hook(0, told.set)
        if it.rank == 1:
            it.store.get("started")
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        it.store.set("started", "1")
        assert told.wait(240)
        error = work.exception()
        assert isinstance(error, (PeerFailedError, RevokedError))
        return [it.group.get_error().name in ("REMOTE_ERROR", "COMM_ERROR")]


def test_a_hook_hears_of_a_death(tmp_path: Path) -> None:
    found = RunRanks(tmp_path).survivors(3, hook_of_a_death, deadline_s=DEADLINE_S)
    assert found == {0: [True], 2: [True]}
