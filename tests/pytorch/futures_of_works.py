# SPDX-License-Identifier: Apache-2.0
"""For tests of futures: works of every kind, and ranks that tell each other."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LIMIT_S", "LONG", "hear", "my_threads", "numbers", "started", "tell"]

LONG = timedelta(seconds=300)
LIMIT_S = 250.0


def tell(key: str) -> None:
    """Tell the other ranks that this one has come to a place."""
    _store().set(f"told/{key}/{dist.get_rank()}", "yes")


def hear(key: str, rank: int) -> None:
    """Wait until a rank has come to a place."""
    _store().wait([f"told/{key}/{rank}"], LONG)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * dist.get_rank()


def my_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "commrt-futures" in t.name]


def _batch(count: int) -> Any:
    """Start messages to and from the last rank together; return the last Work."""
    size, rank = dist.get_world_size(), dist.get_rank()
    last = size - 1
    peers = range(last) if rank == last else [last]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, numbers(count), peer) for peer in peers]
        + [dist.P2POp(dist.irecv, torch.zeros(count), peer) for peer in peers]
    )
    for work in works[:-1]:
        if rank == last:
            work.wait()
    return works[-1]


def started(kind: str) -> Any:
    """Start an operation in which the last rank has a part; return its Work."""
    size, rank = dist.get_world_size(), dist.get_rank()
    last, x = size - 1, numbers(3)
    match kind:
        case "all_reduce":
            return dist.all_reduce(x, async_op=True)
        case "long":
            return dist.all_reduce(numbers(300_001), async_op=True)
        case "empty":
            return dist.all_reduce(torch.empty(0), async_op=True)
        case "strided":
            return dist.all_reduce(numbers(8).view(2, 4).t(), async_op=True)
        case "broadcast":
            return dist.broadcast(x, last, async_op=True)
        case "reduce":
            return dist.reduce(x, 0, async_op=True)
        case "all_gather":
            out = [torch.zeros(3) for _ in range(size)]
            return dist.all_gather(out, x, async_op=True)
        case "reduce_scatter":
            return dist.reduce_scatter(
                torch.zeros(3), [x.clone() for _ in range(size)], async_op=True
            )
        case "all_to_all":
            out = torch.zeros(size)
            return dist.all_to_all_single(out, numbers(size), async_op=True)
        case "splits":
            even = [2] * size
            out = torch.zeros(2 * size)
            x = numbers(2 * size)
            return dist.all_to_all_single(out, x, even, even, async_op=True)
        case "gather":
            to = [torch.zeros(3) for _ in range(size)] if rank == 0 else None
            return dist.gather(x, to, dst=0, async_op=True)
        case "scatter":
            given = [x + i for i in range(size)] if rank == last else None
            return dist.scatter(torch.zeros(3), given, src=last, async_op=True)
        case "barrier":
            return dist.barrier(async_op=True)
        case "sparse":
            return dist.all_reduce(torch.eye(3).to_sparse(), async_op=True)
        case "messages":
            if rank == last:
                for peer in range(last):
                    work = dist.isend(numbers(3), peer)
                    work.wait()
                return work
            return dist.irecv(x, last)
        case "long messages":
            if rank == last:
                out = torch.zeros(300_000)
                for peer in range(last):
                    work = dist.irecv(out, peer)
                    work.wait()
                return work
            return dist.isend(numbers(300_000), last)
        case "from anyone":
            if rank == last:
                for peer in range(last):
                    work = dist.isend(numbers(3), peer)
                    work.wait()
                return work
            return dist.irecv(x)
        case "managed":
            tensors = [numbers(2), numbers(70_000)]
            with dist._coalescing_manager(async_ops=True) as manager:
                for each in tensors:
                    dist.all_reduce(each)
            (work,) = manager.works
            return work
        case "coalesced":
            group: Any = dist.group.WORLD
            return group.allreduce_coalesced([numbers(2), numbers(3)])
        case "batch":
            return _batch(3)
        case "coalesced messages":
            return _batch(70_000)
    raise AssertionError(kind)
