# SPDX-License-Identifier: Apache-2.0
"""Communicators that were freed leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from dict_store import DictStore
from freed_communicators import (
    NUM_ROUNDS,
    NUM_WINDOWS,
    ROUNDS,
    count,
    left_by_each_window,
)

from commrt.bootstrap.store import StoreBootstrap
from commrt.comm import Communicator
from commrt.core import Core
from commrt.launch.detect import LaunchInfo
from commrt.runtime import open_world

_SIZE = 2


@pytest.mark.parametrize("what", ROUNDS)
def test_communicators_that_were_freed_leave_nothing(
    what: str, run_threads: Callable[..., list[Any]]
) -> None:
    store = DictStore()
    counts: list[dict[str, int]] = []
    take_turns = threading.Barrier(_SIZE)

    def rank_main(rank: int) -> None:
        launch = LaunchInfo("single", rank, _SIZE, "threads of one process")
        bootstrap = StoreBootstrap(store, rank, _SIZE)
        world = open_world(bootstrap, launch, in_process=True, timeout_s=300)
        identity = world.agree_id(range(_SIZE), "world")
        comm = Communicator(Core(world, range(_SIZE), "world", identity))
        for _ in range(NUM_WINDOWS + 1):
            for _ in range(NUM_ROUNDS):
                ROUNDS[what](comm)
            take_turns.wait()
            if rank == 0:
                counts.append(count(keys=len(store.values)))
            take_turns.wait()
        comm.free()

    run_threads(_SIZE, rank_main, deadline_s=300)
    assert left_by_each_window(counts) == {}, counts
