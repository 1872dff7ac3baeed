# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients, and the order in which they are started.

Both follow from facts that all ranks share, or from what rank 0 has seen and told the
others. So all ranks have the same buckets in the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

__all__ = ["cut", "start_order"]


def cut(
    order: Sequence[int], nbytes: Sequence[int], most: int, alone: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """Return buckets of parameters, each as long as ``most`` allows.

    Args:
        order: the parameters, as their gradients are expected.
        nbytes: of each parameter.
        most: of a bucket; one parameter may have more.
        alone: parameters that share their bucket with no other one.
    """
    buckets: list[list[int]] = []
    room = -1
    for index in order:
        fits = nbytes[index] <= room and index not in alone
        if fits:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            room = -1 if index in alone else most
        room -= nbytes[index]
    return [tuple(bucket) for bucket in buckets]


def start_order(
    ready: Sequence[float], seconds: Sequence[float], needed: Sequence[int]
) -> list[int]:
    """Return the order of buckets that a queue by priority would have given.

    One bucket is under way at a time. Whenever one ends, the next is that which, of
    those ready by then, is needed first. A queue would decide this as it goes. But each
    rank's queue would see other times, and ranks must start the same operations in the
    same order. So it is decided ahead, from the times of an earlier step.

    Args:
        ready: when each bucket's gradients are there.
        seconds: how long each takes.
        needed: the place of each bucket in the order of need; less is earlier.
    """
    arriving = sorted(range(len(ready)), key=lambda bucket: (ready[bucket], bucket))
    waiting: list[tuple[int, int]] = []
    found: list[int] = []
    now = 0.0
    while arriving or waiting:
        if not waiting:
            now = max(now, ready[arriving[0]])
        while arriving and ready[arriving[0]] <= now:
            bucket = arriving.pop(0)
            heapq.heappush(waiting, (needed[bucket], bucket))
        _, bucket = heapq.heappop(waiting)
        found.append(bucket)
        now += seconds[bucket]
    return found
