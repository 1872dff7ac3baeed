# SPDX-License-Identifier: Apache-2.0
"""What torch's profiler sees of a process group's calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from process_groups import job
from torch.profiler import ProfilerActivity, profile


def calls(rank: int) -> None:
    x, both = torch.ones(6), torch.ones(12)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x.to_sparse())
    dist.broadcast(x, 1)
    dist.reduce(x, 0)
    dist.all_gather_into_tensor(both, x)
    dist.all_gather([both[:6], both[6:]], x)
    dist.reduce_scatter_tensor(x, both)
    dist.all_to_all_single(both, both.clone())
    dist.all_to_all_single(both, both.clone(), [6, 6], [6, 6])
    dist.gather(x, [both[:6], both[6:]] if rank == 0 else None)
    dist.scatter(x, [both[:6], both[6:]] if rank == 0 else None)
    dist.barrier()
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    dist.send(x, 0) if rank == 1 else dist.recv(x)


def seen() -> list[dict[str, int]]:
    """Return how often the profiler sees each call, and what it sees afterwards."""
    found = []
    with job() as rank:
        for times in (2, 1):
            with profile(activities=[ProfilerActivity.CPU]) as within:
                for _ in range(times):
                    calls(rank)
            calls(rank)
            names = Counter(event.name for event in within.events())
            found.append({n: c for n, c in names.items() if n.startswith("commrt:")})
    return found


def test_each_call_is_seen_by_the_name_of_other_backends(torchrun: Any) -> None:
    want = {
        "commrt:all_reduce": 2,
        "commrt:all_reduce_sparse": 1,
        "commrt:broadcast": 1,
        "commrt:reduce": 1,
        "commrt:all_gather": 2,
        "commrt:reduce_scatter": 1,
        "commrt:all_to_all": 2,
        "commrt:gather": 1,
        "commrt:scatter": 1,
        "commrt:barrier": 1,
        "commrt:send": 1,
        "commrt:recv": 1,
    }
    for twice, once in torchrun(2, seen, deadline_s=300):
        # One call is not waited for; messages have a Work, too.
        waits = once.pop("commrt:wait")
        assert waits >= 3
        assert twice.pop("commrt:wait") == 2 * waits
        assert once == want
        assert twice == {name: 2 * count for name, count in want.items()}
