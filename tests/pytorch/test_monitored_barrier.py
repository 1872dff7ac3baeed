# SPDX-License-Identifier: Apache-2.0
"""monitored_barrier of a group: who did not come is named, to all that did."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job

from commrt.errors import TimeoutError_, UsageError

DEADLINE_S = 300.0
LIMIT = timedelta(seconds=0.2)
LONG = timedelta(seconds=300)


def told(group: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(dist.DistBackendError) as raised:
        group.monitored_barrier(*args, **more)
    assert isinstance(raised.value, TimeoutError_)
    return str(raised.value)


def everyone_comes() -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    x = torch.arange(3.0)
    for _ in range(3):
        dist.all_reduce(x)
        assert group.monitored_barrier() is None
        group.monitored_barrier(LONG, wait_all_ranks=True)
        group.monitored_barrier(timeout=300)
    assert x.tolist() == [0.0, size**3, 2 * size**3]
    # Nobody's messages are taken for those of the barrier, nor the other way round.
    right, left = (dist.get_rank() + 1) % size, (dist.get_rank() - 1) % size
    sent = dist.isend(torch.tensor([1.0 + dist.get_rank()]), right)
    group.monitored_barrier(LONG)
    got = torch.zeros(1)
    dist.recv(got)
    sent.wait()
    assert got.item() == 1.0 + left


def nobody_comes_but_rank_0(wait_all_ranks: bool) -> str | None:
    group = dist.new_group(timeout=LONG)
    said = None
    if dist.get_rank() == 0:
        said = told(group, LIMIT, wait_all_ranks=wait_all_ranks)
    dist.barrier()
    return said


def the_last_is_late() -> str:
    """All are told at once; when all come again, all pass."""
    group, last = dist.new_group(timeout=LONG), dist.get_world_size() - 1
    group.monitored_barrier(LONG)
    if dist.get_rank() != last:
        said = told(group, LIMIT)
        dist.barrier()
    else:
        dist.barrier()
        said = told(group)
    group.monitored_barrier(LONG)
    dist.all_reduce(torch.ones(1), group=group)
    group.monitored_barrier(LONG, wait_all_ranks=True)
    return said


def rank_0_does_not_come() -> str | None:
    """The others wait as long as the group's calls do; then all pass."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    said = None
    if dist.get_rank() != 0:
        said = told(group, LIMIT)
    dist.barrier()
    group.set_timeout(LONG)
    group.monitored_barrier(LONG)
    group.monitored_barrier(LONG)
    return said


def no_time() -> str | None:
    group = dist.new_group(timeout=LONG)
    said = told(group, timedelta(0)) if dist.get_rank() == 0 else None
    dist.barrier()
    return said


def members_only() -> str | None:
    group = dist.new_group([0, dist.get_world_size() - 1], timeout=LONG)
    said = told(group, LIMIT) if dist.get_rank() == 0 else None
    dist.barrier()
    return said


def refused() -> str:
    with pytest.raises(UsageError) as raised:
        dist.group.WORLD.monitored_barrier("soon")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone[dist.get_rank()].monitored_barrier(timedelta(0))
    return str(raised.value)


def barriers() -> list[str | None]:
    with job():
        everyone_comes()
        return [
            nobody_comes_but_rank_0(False),
            nobody_comes_but_rank_0(True),
            the_last_is_late(),
            rank_0_does_not_come(),
            no_time(),
            members_only(),
            refused(),
        ]


def check(said: list[list[Any]]) -> None:
    size, zeroth, last = len(said), said[0], len(said) - 1
    first, every, late, _, no, member, _ = zeroth
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 200 ms: on " in first
    missing = ", ".join(map(str, range(1, size)))
    plural = "s" if size > 2 else ""
    assert f"[Rank 0]: Rank{plural} {missing} failed to pass monitoredBarrier" in every
    assert late.startswith(f"[Rank 0]: Rank {last} failed to pass monitoredBarrier in")
    assert "has not come to call #2 of monitored_barrier" in late
    assert no.startswith("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms")
    assert "No ranks successfully processed in monitoredBarrier." in no
    assert "Rank 1 failed to pass" in member
    for rank in range(1, size):
        _, _, late, alone, _, _, bad = said[rank]
        reached = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors "
            f"while waiting for send/recv from rank 0"
        )
        assert reached in late
        assert f"Rank {last} failed to pass" in late
        assert reached in alone
        assert "rank 0 has not answered within 0.3 s" in alone
        assert "timeout='soon' must be a timedelta, or seconds" in bad


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_who_does_not_come_is_named_to_all_that_do(torchrun: Any, ranks: int) -> None:
    check(torchrun(ranks, barriers, deadline_s=DEADLINE_S))


@pytest.mark.full
def test_ranks_of_other_nodes_are_named(torchrun: Any) -> None:
    env = {"COMMRT_NODES": "2,1"}
    check(torchrun(3, barriers, deadline_s=DEADLINE_S, env=env))
