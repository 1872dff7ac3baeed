# SPDX-License-Identifier: Apache-2.0
"""Ranks are killed, come late or stay out, and torch's reconfigure connects the others.

Real processes, in which SIGKILL ends one at a chosen place.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reconfigured_groups import Changing, changing
from run_ranks import RunRanks

from commrt.errors import (
    BackendError,
    CommError,
    PeerFailedError,
    RevokedError,
    UsageError,
)
from commrt.torch import Options
from commrt.torch.backend import can_be_made

DEADLINE_S = 300.0
ELSEWHERE = r"rank \d of another node has ended it|rank \d has left"
"""Between nodes ranks hear who has ended a group, or left it, and not why."""
FAILED = (PeerFailedError, RevokedError)
pytestmark = pytest.mark.skipif(
    not can_be_made(), reason="torch has reconfiguration from 2.14 on"
)


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def last_error() -> CommError:
    """Return the error that ends the calls of a rank whose peer dies."""
    x = torch.ones(1000)
    while True:
        try:
            dist.all_reduce(x)
        except FAILED as error:
            return error


# -- deaths --------------------------------------------------------------------------


def trained(steps: int) -> list[float]:
    """Return gradients of a model under DDP, on the default group as it is."""
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    found = []
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 3), step + dist.get_rank() + 1.0)).sum().backward()
        weight = model.module.weight.grad
        assert weight is not None
        found.append(float(weight[0, 0]))
    return found


def expected(steps: int, size: int) -> list[float]:
    mean = sum(range(1, size + 1)) / size
    return [2 * (step + mean) for step in range(steps)]


def goes_on(dies: list[int]) -> list[Any]:
    """Some ranks are killed; the others train on, and new groups are of them."""
    with changing("goes_on") as it:
        it.connect("goes_on", 1)
        assert trained(2) == expected(2, it.size)
        if it.rank in dies:
            die()
        error = last_error()
        assert any(f"rank {rank} " in str(error) for rank in dies), error
        kind = it.backend.get_error().name
        left = [rank for rank in range(it.size) if rank not in dies]
        it.reconfigure(2, it.handles("left", left))
        assert it.is_right()
        assert trained(2) == expected(2, len(left))
        x = torch.ones(1)
        dist.all_reduce(x, group=dist.new_group())
        return [dist.get_rank(), dist.get_world_size(), kind, float(x)]


@pytest.mark.full(sample=1)
@pytest.mark.parametrize(
    ("size", "dies"), [(2, [0]), (3, [1]), (3, [2]), (3, [0]), (5, [1, 4])]
)
def test_the_others_go_on(ranks: RunRanks, size: int, dies: list[int]) -> None:
    left = [rank for rank in range(size) if rank not in dies]
    found = ranks.survivors(size, goes_on, deadline_s=DEADLINE_S, dies=dies)
    assert sorted(found) == left
    for number, rank in enumerate(left):
        new_rank, new_size, kind, total = found[rank]
        assert (new_rank, new_size, total) == (number, len(left), len(left))
        assert kind in ("REMOTE_ERROR", "COMM_ERROR")


def one_dies_within(place: str) -> str:
    """A rank is killed while the others reconfigure: they hear of it at once."""
    with changing("within") as it:
        handles = it.handles("within")
        if it.rank == 1:
            if place == "before":
                it.store.set("dead_soon", "1")
                die()
            from commrt.torch import generations, jobs

            inside = {
                "met": (generations.Generation, "conclude"),
                "world": (jobs, "join_anew"),
            }
            setattr(*inside[place], lambda *args: die())
        else:
            it.store.get("dead_soon") if place == "before" else None
        with pytest.raises(
            PeerFailedError, match=r"process \d+ on .* has ended"
        ) as raised:
            it.reconfigure(1, handles)
        assert isinstance(raised.value, RuntimeError)
        assert dist.get_rank() == -1
        left = [rank for rank in range(it.size) if rank != 1]
        it.reconfigure(2, it.handles("left", left))
        assert it.is_right()
    return "right"


@pytest.mark.parametrize("place", ["before", "world", "met"])
def test_one_dies_while_the_others_wait(ranks: RunRanks, place: str) -> None:
    found = ranks.survivors(3, one_dies_within, deadline_s=DEADLINE_S, place=place)
    assert found == {0: "right", 2: "right"}


def the_host_dies(folder: str) -> str:
    """The store's server ends with rank 0, and nobody can meet without."""
    from commrt.launch.detect import detect

    launch = detect()
    path = Path(folder, "port")
    limit = timedelta(seconds=240)
    is_host = launch.rank == 0
    if is_host:
        store = dist.TCPStore("localhost", 0, 2, True, limit, wait_for_workers=False)
        whole = path.with_suffix(".new")
        whole.write_text(str(store.port))
        whole.rename(path)
    else:
        while not path.exists():
            threading.Event().wait(0.01)
        port = int(path.read_text())
        store = dist.TCPStore("localhost", port, 2, False, limit)
    where = {"rank": launch.rank, "world_size": 2, "enable_reconfigure": True}
    dist.init_process_group("commrt", store=store, **where)
    it = Changing(store, launch.rank, 2)
    it.connect("host", 1)
    dist.barrier()
    if is_host:
        die()
    last_error()
    with pytest.raises(BackendError, match="store in which the ranks meet cannot be"):
        it.reconfigure(2, [it.handle()])
    dist.destroy_process_group()
    return "right"


def test_the_host_of_the_store_dies(ranks: RunRanks, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "deadline_s": DEADLINE_S}
    assert ranks.survivors(2, the_host_dies, **arguments) == {1: "right"}


# -- the old group -------------------------------------------------------------------


def others_wait_in_it(it: Changing) -> None:
    """A rank reconfigures while the others wait for it in the old group."""
    handles = it.connect("wait", 100)
    if it.rank == 0:
        work = dist.irecv(torch.ones(2), group_src=1)
        assert not work.is_completed()
    else:
        with pytest.raises(RevokedError, match=f"rank 0 reconfigures|{ELSEWHERE}"):
            dist.barrier()
    it.reconfigure(101, handles)
    if it.rank == 0:
        assert isinstance(work.exception(), CommError)
        assert not work.is_success()
    assert it.is_right()


def left_out_waits(it: Changing) -> None:
    """A rank that stays out of the new group hears of it where it waits in the old."""
    handles = it.connect("out", 110)
    if it.rank == it.size - 1:
        with pytest.raises(FAILED, match=f"has been reconfigured to|{ELSEWHERE}"):
            dist.all_reduce(torch.ones(3))
        assert it.backend.get_error().name in ("COMM_ERROR", "REMOTE_ERROR")
    else:
        it.reconfigure(111, handles[:-1])
        assert it.is_right()
    it.meet("out_done")
    it.reconfigure(112, handles)
    assert it.is_right()


def old_objects(it: Changing) -> None:
    """What was made of the old group ends with clear errors, or goes on by itself."""
    handles = it.connect("old", 120)
    old = it.group.communicator
    part, window = old.split(0), old.empty(1000)
    inner = dist.new_group()
    it.reconfigure(121, handles[::-1])
    for comm in (old, part):
        with pytest.raises((UsageError, RevokedError)):
            comm.allreduce(torch.ones(1))
    window[:] = 1.0
    x = torch.ones(1)
    dist.all_reduce(x, group=inner)  # torch's group of its own
    assert float(x) == it.size
    assert it.group.communicator.rank == it.size - 1 - it.rank


def groups_after_a_late_rank(it: Changing) -> None:
    """Ranks that made more groups than a late one number the next ones alike."""
    first = range(it.size - 1)
    if it.rank in first:
        it.reconfigure(130, it.handles("some", first))
        for _ in range(3):
            dist.all_reduce(torch.ones(1), group=dist.new_group())
    it.reconfigure(131, it.handles("all"))
    x = torch.ones(1)
    dist.all_reduce(x, group=dist.new_group())
    assert float(x) == it.size


# -- other groups --------------------------------------------------------------------


def groups_of_some(it: Changing) -> None:
    """``new_group`` makes groups that can be reconfigured, too."""
    it.connect("some", 140)
    options = Options(enable_reconfigure=True)
    group = dist.new_group(pg_options=options)
    inner = Changing(it.store, it.rank, it.size, group)
    assert dist._supports_reconfigure(group)
    handles = inner.handles("inner")[::-1]
    inner.reconfigure(140, handles)  # a uuid of this group
    assert inner.is_right()
    assert dist.get_group_rank(group, it.rank) == it.size - 1 - it.rank
    assert dist.get_rank(group) == group.rank() == it.size - 1 - it.rank
    assert dist.get_process_group_ranks(group) == list(range(it.size))[::-1]
    if it.rank != 0:
        inner.reconfigure(141, handles[:-1])
        assert inner.is_right()
        x = torch.full((2,), float(it.rank))
        dist.broadcast(x, src=it.size - 1, group=group)
        assert x.tolist() == [it.size - 1.0] * 2
    it.meet("some_done")
    assert it.is_right()


def a_set(it: Changing) -> None:
    """Of a set, commrt gives the ranks, all ranks of it the same."""
    handles = it.connect("set", 150)
    it.reconfigure(151, {*handles})
    assert (dist.get_rank(), dist.get_world_size()) == (it.rank, it.size)
    assert it.is_right()


def checked(it: Changing) -> None:
    """A group in check mode stays one."""
    it.connect("checked", 160)
    group = dist.new_group(pg_options=Options(enable_reconfigure=True, check=True))
    inner = Changing(it.store, it.rank, it.size, group)
    handles = inner.handles("inner")
    for uuid in (1, 3):
        inner.reconfigure(uuid * 100 + it.rank, [inner.handle()])
        assert inner.is_right()
        inner.reconfigure(uuid + 1, handles)
        assert inner.is_right()
        op = dist.ReduceOp.MAX if it.rank else dist.ReduceOp.SUM
        with pytest.raises(CommError, match="disagree"):
            dist.all_reduce(torch.ones(2), op, group=group)
    assert it.is_right()


def logged(it: Changing) -> None:
    """A log goes on through a reconfiguration."""
    import commrt.trace

    handles = it.connect("logged", 170)
    with commrt.trace.record() as recording:
        dist.all_reduce(torch.ones(2))
        it.reconfigure(171, handles[::-1])
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
        it.reconfigure(172 + it.rank, [it.handle()])
        dist.all_reduce(torch.ones(5))
        # One for each rank that this process has been.
        found = [log.volume(("op",))[("allreduce",)] for log in recording.logs()]
    assert sum(volume.calls for volume in found) == 4
    assert sum(volume.nbytes for volume in found) == 8 + 2 * 12 + 20
    it.reconfigure(180, handles)
    assert it.is_right()


Scenario = Callable[[Changing], None]
SCENARIOS: tuple[Scenario, ...] = (
    *(others_wait_in_it, left_out_waits, old_objects, groups_after_a_late_rank),
    *(groups_of_some, a_set, checked, logged),
)


def run_all() -> str:
    for scenario in SCENARIOS:
        with changing(scenario.__name__) as it:
            scenario(it)
    return "right"


@pytest.mark.parametrize("nodes", ["", "1"])
def test_old_groups_and_others(ranks: RunRanks, nodes: str) -> None:
    env = {"COMMRT_NODES": nodes} if nodes else {}
    found = ranks(3, run_all, env=env, deadline_s=DEADLINE_S)
    assert found == ["right"] * 3


# -- what is left --------------------------------------------------------------------


def reconfigures_often() -> list[int]:
    counts: list[tuple[int, int, int]] = []
    with changing("often") as it:
        handles = it.handles("often")
        for turn in range(30):
            mine = handles[turn % it.size]
            some = handles if turn % 3 else [h for h in handles if h != mine]
            if it.handle() in some:
                it.reconfigure(turn, some)
                dist.get_world_size()
                work = dist.all_reduce(torch.ones(100_000), async_op=True)
                work.get_future().wait()
                if turn % 5 == 0:
                    dist.all_reduce(torch.ones(10), async_op=True).wait()
                    it.group.abort()
            it.meet(f"turn{turn}")
            if turn in (14, 29):
                gc.collect()
                maps = len(Path("/proc/self/maps").read_text().splitlines())
                files = len(os.listdir("/proc/self/fd"))
                counts.append((files, threading.active_count(), maps))
    first, last = counts
    return [last[0] - first[0], last[1] - first[1], max(0, last[2] - first[2] - 10)]


def test_nothing_is_left_of_the_old_ones(ranks: RunRanks) -> None:
    found = ranks(3, reconfigures_often, deadline_s=DEADLINE_S)
    assert found == [[0, 0, 0]] * 3
