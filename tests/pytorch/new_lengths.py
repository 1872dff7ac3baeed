# SPDX-License-Identifier: Apache-2.0
"""Calls of a process group, of any lengths: each method in each of its forms.

All elements are 1. So each result has one value throughout, however long it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

warnings.simplefilter("ignore")  # torch's, of what is deprecated

__all__ = ["FORMS", "check", "splits_of"]

Found = tuple[list[torch.Tensor], float]
Form = Callable[[Any, int], Found]
"""Makes a call whose lengths follow from a number; returns results and their value."""


def ones(*counts: int) -> list[torch.Tensor]:
    """Return tensors that lie apart from each other."""
    return [torch.ones(count) for count in counts]


def empty(*counts: int) -> list[torch.Tensor]:
    return [torch.zeros(count) for count in counts]


def splits_of(group: Any, count: int) -> tuple[list[int], list[int]]:
    """Return the elements to each rank and from each; other ones for each number."""
    size, rank = group.size(), group.rank()
    counts = [[count + 3 * a + b for b in range(size)] for a in range(size)]
    return counts[rank], [row[rank] for row in counts]


def all_reduce(group: Any, count: int) -> Found:
    (x,) = ones(count)
    dist.all_reduce(x, group=group)
    return [x], group.size()


def all_reduce_async(group: Any, count: int) -> Found:
    (x,) = ones(count)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True).wait()
    return [x], 1


def all_reduce_of_strides(group: Any, count: int) -> Found:
    x = torch.ones(count, 2)[:, 0]
    dist.all_reduce(x, group=group)
    return [x], group.size()


def all_reduce_coalesced(group: Any, count: int) -> Found:
    xs = ones(count, 2 * count, 3 * count)
    dist.all_reduce_coalesced(xs, group=group)
    return xs, group.size()


def reduce(group: Any, count: int) -> Found:
    (x,) = ones(count)
    dist.reduce(x, 0, group=group)
    return [x] if group.rank() == 0 else [], group.size()


def broadcast(group: Any, count: int) -> Found:
    (x,) = ones(count) if group.rank() == 0 else empty(count)
    dist.broadcast(x, 0, group=group)
    return [x], 1


def all_gather_into_tensor(group: Any, count: int) -> Found:
    (x,), (out,) = ones(count), empty(count * group.size())
    dist.all_gather_into_tensor(out, x, group=group)
    return [out], 1


def all_gather_into_tensor_async(group: Any, count: int) -> Found:
    (x,), (out,) = ones(count), empty(count * group.size())
    dist.all_gather_into_tensor(out, x, group=group, async_op=True).wait()
    return [out], 1


def all_gather_into_tensors(group: Any, count: int) -> Found:
    xs = ones(count, count + 1)
    outs = empty(count * group.size(), (count + 1) * group.size())
    with dist._coalescing_manager(group):
        for out, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(out, x, group=group)
    return outs, 1


def all_gather(group: Any, count: int) -> Found:
    (x,), outs = ones(count), empty(*[count] * group.size())
    dist.all_gather(outs, x, group=group)
    return outs, 1


def all_gather_of_parts(group: Any, count: int) -> Found:
    (x,), (whole,) = ones(count), empty(count * group.size())
    dist.all_gather(list(whole.chunk(group.size())), x, group=group)
    return [whole], 1


def all_gather_of_unequal(group: Any, count: int) -> Found:
    counts = [count + rank for rank in range(group.size())]
    (x,), outs = ones(counts[group.rank()]), empty(*counts)
    dist.all_gather(outs, x, group=group)
    return outs, 1


def all_gather_coalesced(group: Any, count: int) -> Found:
    xs = ones(count, count + 1)
    outs = [empty(count, count + 1) for _ in range(group.size())]
    group.allgather_coalesced(outs, xs).wait()
    return [each for of_rank in outs for each in of_rank], 1


def gather(group: Any, count: int) -> Found:
    (x,), outs = ones(count), empty(*[count] * group.size())
    is_root = group.rank() == 0
    dist.gather(x, outs if is_root else None, 0, group=group)
    return outs if is_root else [], 1


def gather_single(group: Any, count: int) -> Found:
    (x,), (out,) = ones(count), empty(count * group.size())
    options = c10d.GatherOptions()
    options.rootRank = 0
    group.gather_single(out, x, options).wait()
    return [out] if group.rank() == 0 else [], 1


def scatter(group: Any, count: int) -> Found:
    (out,), xs = empty(count), ones(*[count] * group.size())
    dist.scatter(out, xs if group.rank() == 0 else None, 0, group=group)
    return [out], 1


def reduce_scatter_tensor(group: Any, count: int) -> Found:
    (out,), (x,) = empty(count), ones(count * group.size())
    dist.reduce_scatter_tensor(out, x, group=group)
    return [out], group.size()


def reduce_scatter_tensors(group: Any, count: int) -> Found:
    outs = empty(count, count + 1)
    xs = ones(count * group.size(), (count + 1) * group.size())
    with dist._coalescing_manager(group):
        for out, x in zip(outs, xs, strict=True):
            dist.reduce_scatter_tensor(out, x, group=group)
    return outs, group.size()


def reduce_scatter(group: Any, count: int) -> Found:
    (out,), xs = empty(count), ones(*[count] * group.size())
    dist.reduce_scatter(out, xs, group=group)
    return [out], group.size()


def reduce_scatter_of_unequal(group: Any, count: int) -> Found:
    counts = [count + rank for rank in range(group.size())]
    (out,), xs = empty(counts[group.rank()]), ones(*counts)
    dist.reduce_scatter(out, xs, group=group)
    return [out], group.size()


def all_to_all_single(group: Any, count: int) -> Found:
    (out,), (x,) = empty(count * group.size()), ones(count * group.size())
    dist.all_to_all_single(out, x, group=group)
    return [out], 1


def all_to_all_single_of_splits(group: Any, count: int) -> Found:
    sent, received = splits_of(group, count)
    (out,), (x,) = empty(sum(received)), ones(sum(sent))
    dist.all_to_all_single(out, x, received, sent, group=group)
    return [out], 1


def all_to_all_single_async(group: Any, count: int) -> Found:
    sent, received = splits_of(group, count)
    (out,), (x,) = empty(sum(received)), ones(sum(sent))
    dist.all_to_all_single(out, x, received, sent, group=group, async_op=True).wait()
    return [out], 1


def all_to_all_single_of_rows(group: Any, count: int) -> Found:
    sent, received = (np.array(each) for each in splits_of(group, count))
    out, x = torch.zeros(received.sum(), 2), torch.ones(sent.sum(), 2)
    dist.all_to_all_single(out, x, received, sent, group=group)
    return [out], 1


def all_to_all(group: Any, count: int) -> Found:
    sent, received = splits_of(group, count)
    outs = empty(*received)
    dist.all_to_all(outs, ones(*sent), group=group)
    return outs, 1


def with_limit(options: Any) -> Any:
    """Return torch's options with a limit of the call's own."""
    options.timeout = timedelta(seconds=300)
    options.asyncOp = False
    return options


def all_reduce_with_limit(group: Any, count: int) -> Found:
    (x,) = ones(count)
    group.allreduce([x], with_limit(c10d.AllreduceOptions()))
    return [x], group.size()


def broadcast_with_limit(group: Any, count: int) -> Found:
    (x,) = ones(count) if group.rank() == 0 else empty(count)
    group.broadcast([x], with_limit(c10d.BroadcastOptions()))
    return [x], 1


def all_gather_into_tensor_with_limit(group: Any, count: int) -> Found:
    (x,), (out,) = ones(count), empty(count * group.size())
    group._allgather_base(out, x, with_limit(c10d.AllgatherOptions()))
    return [out], 1


def all_to_all_single_with_limit(group: Any, count: int) -> Found:
    sent, received = splits_of(group, count)
    (out,), (x,) = empty(sum(received)), ones(sum(sent))
    options = with_limit(c10d.AllToAllOptions())
    group.alltoall_base(out, x, received, sent, options)
    return [out], 1


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        *(all_reduce, all_reduce_async, all_reduce_of_strides, all_reduce_coalesced),
        *(reduce, broadcast, all_gather_into_tensor, all_gather_into_tensor_async),
        *(all_gather_into_tensors, all_gather, all_gather_of_parts),
        *(all_gather_of_unequal, all_gather_coalesced, gather, gather_single, scatter),
        *(reduce_scatter_tensor, reduce_scatter_tensors, reduce_scatter),
        *(reduce_scatter_of_unequal, all_to_all_single, all_to_all_single_of_splits),
        *(all_to_all_single_async, all_to_all_single_of_rows, all_to_all),
        *(all_reduce_with_limit, broadcast_with_limit),
        *(all_gather_into_tensor_with_limit, all_to_all_single_with_limit),
    )
}
"""All of them, by name."""


def check(name: str, group: Any, count: int) -> list[str]:
    """Make a call; return its name where its result is wrong."""
    results, value = FORMS[name](group, count)
    right = all(bool((each == value).all()) and each.numel() for each in results)
    return [] if right else [f"{name} of {count}"]
