# SPDX-License-Identifier: Apache-2.0
"""Processes are killed, and the others go on: ``shrink``, with real ranks."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from freed_communicators import FREED, garbage_of
from run_ranks import RunRanks

import commrt
import commrt.founding
from commrt.bootstrap.store import StoreBootstrap
from commrt.comm import Communicator, core_of
from commrt.core import Core
from commrt.errors import CommError, PeerFailedError, RevokedError, TimeoutError_

FAILED = (PeerFailedError, RevokedError)


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sum_of(comm: Communicator) -> float:
    return float(comm.allreduce(np.array([2.0**comm.rank]))[0])


def last_error(comm: Communicator) -> CommError:
    """Return the error that ends the calls of a rank whose peer dies."""
    x = np.ones(1000)
    while True:
        try:
            comm.allreduce(x.copy())
        except FAILED as error:
            return error


def goes_on(dies: list[int]) -> list[Any]:
    comm = commrt.init()
    sum_of(comm)
    if comm.rank in dies:
        die()
    error = last_error(comm)
    made = comm.shrink()
    comm.free()
    named = [rank for rank in dies if f"rank {rank} " in str(error)]
    same = core_of(commrt.init()) is core_of(made)
    return [made.rank, made.size, sum_of(made), bool(named), same]


@pytest.mark.full(sample=2)
@pytest.mark.parametrize(
    ("size", "dies"), [(2, [0]), (2, [1]), (3, [1]), (5, [4]), (5, [0, 3]), (4, [1, 2])]
)
def test_the_others_go_on(ranks: RunRanks, size: int, dies: list[int]) -> None:
    left = [rank for rank in range(size) if rank not in dies]
    assert ranks.survivors(size, goes_on, dies=dies) == {
        rank: [number, len(left), 2.0 ** len(left) - 1, True, True]
        for number, rank in enumerate(left)
    }


def one_after_the_other() -> list[float]:
    comm = commrt.init()
    first = comm.rank
    sums = [sum_of(comm)]
    for turn in range(comm.size - 1):
        if turn == first:
            die()
        last_error(comm)
        old, comm = comm, comm.shrink()
        old.free()
        sums.append(sum_of(comm))
    return sums


def test_ranks_die_until_one_is_left(ranks: RunRanks) -> None:
    found = ranks.survivors(4, one_after_the_other)
    assert found == {3: [15.0, 7.0, 3.0, 1.0]}


def dies_within(where: str) -> list[Any]:
    """Rank 3 dies first; rank 1 at one point of its shrink()."""
    comm = commrt.init()
    sum_of(comm)
    first = comm.rank
    if first == 3:
        die()
    if first == 1:
        _die_at(where)
    last_error(comm)
    made = comm.shrink()
    sums = [sum_of(made)]
    if where == "after" and first == 1:
        die()
    if where == "after":
        last_error(made)
        made = made.shrink()
    return [*sums, made.rank, made.size, sum_of(made)]


def _die_at(where: str) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        die()

    if where == "before":
        die()
    if where == "said":  # the others read that it comes, and decide with it
        agree = StoreBootstrap.exchange
        StoreBootstrap.exchange = (  # type: ignore[method-assign]
            lambda self, members, key, *more: (
                dies() if key == "met" else agree(self, members, key, *more)
            )
        )
    if where == "connecting":
        commrt.founding.connect_world = dies
    if where == "made":
        made = commrt.founding.Founder._made_with

        def founded(*arguments: Any) -> Any:
            made(*arguments)
            die()

        commrt.founding.Founder._made_with = founded  # type: ignore[method-assign]


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("where", ["before", "said", "connecting", "made", "after"])
def test_another_dies_while_they_shrink(ranks: RunRanks, where: str) -> None:
    found = ranks.survivors(5, dies_within, where=where)
    first = 15.0 if where == "after" else 7.0
    expected = {old: [first, new, 3, 7.0] for new, old in enumerate([0, 2, 4])}
    assert found == expected


def is_stopped_and_comes_again() -> list[Any]:
    comm = commrt.init()
    world = core_of(comm).world
    assert world.liveness is not None
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        error = last_error(comm)
    else:
        with pytest.raises(TimeoutError_):
            comm.allreduce(np.ones(1000), timeout_s=0.3)
        world.meet([0, 1], "both gave up")
        comm.revoke("rank 2 is late")
        with pytest.raises(TimeoutError_, match="rank 2 neither came nor ended") as up:
            comm.shrink(timeout_s=0.3)
        error = up.value
        world.meet([0, 1], "both gave up again")
        if comm.rank == 0:
            name = world.liveness.native.name(2)
            os.kill(int(name.split()[1]), signal.SIGCONT)
    made = comm.shrink()
    return [type(error).__name__, made.size, sum_of(made)]


def test_a_stopped_rank_is_late_and_no_more(ranks: RunRanks) -> None:
    assert ranks.survivors(3, is_stopped_and_comes_again) == {
        0: ["TimeoutError_", 3, 7.0],
        1: ["TimeoutError_", 3, 7.0],
        2: ["RevokedError", 3, 7.0],
    }


def leaves() -> list[Any]:
    comm = commrt.init()
    sum_of(comm)
    if comm.rank == 0:
        return []  # its process ends in order
    error = last_error(comm)
    made = comm.shrink()
    return ["has ended" in str(error) or "left" in str(error), sum_of(made)]


def test_a_rank_that_leaves_is_left_out(ranks: RunRanks) -> None:
    found = ranks.survivors(3, leaves)
    assert found == {0: [], 1: [True, 3.0], 2: [True, 3.0]}


def agrees_while_one_dies() -> list[int]:
    comm = commrt.init()
    first = comm.rank
    flags = [comm.agree(first != 2)]
    if first == 1:
        die()
    flags.append(comm.agree(7 if first else 5))
    return flags


def test_ranks_agree_although_one_dies(ranks: RunRanks) -> None:
    expected = {rank: [0, 5] for rank in (0, 2, 3)}
    assert ranks.survivors(4, agrees_while_one_dies) == expected


def shrinks_often() -> list[int]:
    """Return what grows; no garbage collector helps, and the old ones stay alive."""
    comm = commrt.init()
    counts, kept = [], []
    gc.disable()
    for turn in range(30):
        comm.empty(1000)
        part = comm.split(0)
        part.revoke()
        part.free()
        comm.allreduce(np.ones(100_000), nonblocking=True).wait()
        comm.revoke()
        old, comm = comm, comm.shrink()
        old.free()
        kept.append(old)
        sum_of(comm)
        if turn in (9, 29):
            maps = len(Path("/proc/self/maps").read_text().splitlines())
            files = len(os.listdir("/proc/self/fd"))
            counts += [files, threading.active_count(), maps]
    (files, threads, maps), later = counts[:3], counts[3:]
    return [later[0] - files, later[1] - threads, max(0, later[2] - maps - 10)]


def test_nothing_is_left_of_the_old_ones(ranks: RunRanks) -> None:
    assert ranks.survivors(3, shrinks_often) == {key: [0, 0, 0] for key in range(3)}


def frees_worlds() -> list[int]:
    """Return how many cores there are, and what only the collector finds."""
    comm = commrt.init()
    comm.allgather_object(comm.rank)
    gc.collect()
    gc.disable()
    for _ in range(3):
        comm.allreduce(np.ones(100_000), nonblocking=True).wait()
        comm.revoke()
        old, comm = comm, comm.shrink()
        old.free()
        del old
    there = sum(isinstance(each, Core) for each in gc.get_objects())
    return [there, gc.collect()]


def test_a_freed_world_needs_no_collector(ranks: RunRanks) -> None:
    assert ranks.survivors(3, frees_worlds) == {key: [1, 0] for key in range(3)}


def test_freed_communicators_need_no_collector(ranks: RunRanks) -> None:
    found = ranks(2, garbage_of, kinds=FREED)
    assert found == [dict.fromkeys(FREED, 0)] * 2
