# SPDX-License-Identifier: Apache-2.0
"""Ranges of NVTX around a process group's calls, seen by a pretended library."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake_nvtx import begun, build, lines_of
from process_groups import job

DEADLINE_S = 300.0
TIMES = 3


def ranges() -> dict[str, int]:
    """Return how many ranges there were of each operation, length and group.

    From its second time on, a call of a group without ranges is a plain one.
    """
    said = lines_of(Path(os.environ["COMMRT_NVTX_LIB"]))
    with job() as rank:
        x, all_of_it = torch.ones(6), torch.ones(12)
        said()
        for _ in range(TIMES):
            dist.all_reduce(x)
            dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
            dist.broadcast(x, 1)
            dist.reduce(x, 0)
            dist.all_gather_into_tensor(all_of_it, x)
            dist.reduce_scatter_tensor(x, all_of_it)
            dist.all_to_all_single(all_of_it, all_of_it.clone())
            dist.barrier()
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        lines = said()
    begun(lines)
    words = [line.split() for line in lines if line != "end"]
    return dict(Counter(f"{word[1]} {word[2]}" for word in words))


def test_each_call_of_a_group_has_its_range(torchrun: Any, tmp_path: Path) -> None:
    env = {"COMMRT_NVTX": "1", "COMMRT_NVTX_LIB": str(build(tmp_path))}
    first, second = torchrun(2, ranges, deadline_s=DEADLINE_S, env=env)
    both = {
        "allreduce 24": 2 * TIMES,
        "bcast 24": TIMES,
        "reduce 24": TIMES,
        "allgather 24": TIMES,
        "reduce_scatter 48": TIMES,
        "alltoall 48": TIMES,
    }
    barriers = {name for name in first if name.startswith("barrier ")}
    assert [first.pop(name) for name in barriers] == [TIMES]
    assert [second.pop(name) for name in barriers] == [TIMES]
    assert first == {**both, "send 24": TIMES}
    assert second == {**both, "recv 24": TIMES}
