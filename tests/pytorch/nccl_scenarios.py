# SPDX-License-Identifier: Apache-2.0
"""Scenarios of what programs written for NCCL pass, which gloo mostly refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from scenarios import numbers, scenario

OP = dist.ReduceOp
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@scenario(gloo_cannot="it has no PREMUL_SUM")
def sums_with_a_factor(group: Any) -> Any:
    size = dist.get_world_size(group)
    total = size * (size + 1) / 2
    x = torch.full((4,), dist.get_rank(group) + 1.0)
    dist.all_reduce(x, OP.PREMUL_SUM(0.5), group=group)
    out = torch.empty(2, dtype=torch.bfloat16)
    each = torch.ones(2 * size, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(out, each, OP.PREMUL_SUM(torch.tensor(2.0)), group=group)
    want = torch.full((2,), 2.0 * size, dtype=torch.bfloat16)
    return [(x, torch.full((4,), total / 2)), (out, want)]


@scenario(gloo_cannot="its lists have tensors of one length")
def lists_of_different_lengths(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = [[(a * 2 + b) % 4 for b in range(size)] for a in range(size)]
    sent = [torch.full((counts[rank][b],), 10.0 * rank + b) for b in range(size)]
    got = [torch.empty(counts[a][rank]) for a in range(size)]
    dist.all_to_all(got, sent, group=group)
    want = [torch.full((counts[a][rank],), 10.0 * a + rank) for a in range(size)]
    outs = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)), group=group)
    mine = torch.empty(rank + 1)
    parts = [torch.full((r + 1,), rank + 1.0) for r in range(size)]
    dist.reduce_scatter(mine, parts, group=group)
    return [
        (got, want),
        (outs, [torch.full((r + 1,), float(r)) for r in range(size)]),
        (mine, torch.full((rank + 1,), size * (size + 1) / 2)),
    ]


@scenario(gloo_cannot="it takes them, and what comes out is wrong")
def tensors_of_any_strides(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    base = torch.zeros(6, 4)
    base.t()[::2].fill_(rank + 1.0)
    dist.all_reduce(base.t()[::2], group=group)
    want = torch.zeros(6, 4)
    want.t()[::2] = size * (size + 1) / 2
    columns = torch.zeros(4, 2 * size).t()
    mine = torch.arange(8.0).reshape(2, 4) + rank
    dist.all_gather_into_tensor(columns, mine, group=group)
    rows = torch.cat([torch.arange(8.0).reshape(2, 4) + r for r in range(size)])
    out = torch.zeros(3, 5).t()
    dist.broadcast(out if rank else torch.arange(15.0).reshape(5, 3), 0, group=group)
    last = out if rank else torch.arange(15.0).reshape(5, 3)
    return [(base, want), (columns, rows), (last, torch.arange(15.0).reshape(5, 3))]


@scenario(gloo_cannot="it gathers the numbers of before the conjugation")
def conjugates(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = torch.full((3,), complex(1, 1 + rank)).conj()
    outs = [torch.empty_like(mine) for _ in range(size)]
    group.allgather([outs], [mine]).wait()
    want = [torch.full((3,), complex(1, -1 - r)) for r in range(size)]
    return [(outs, want)]


@scenario(gloo_cannot="an input may not be among its outputs")
def inputs_among_the_outputs(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(size, 3)
    whole[rank] = rank + 1.0
    dist.all_gather_into_tensor(whole, whole[rank], group=group)
    outs = [torch.zeros(3) for _ in range(size)]
    outs[rank].fill_(rank + 1.0)
    dist.all_gather(outs, outs[rank], group=group)
    total = torch.arange(3.0 * size)
    mine = total[3 * rank : 3 * rank + 3]
    dist.reduce_scatter_tensor(mine, total, group=group)
    x = torch.arange(float(size)) + 10 * rank
    dist.all_to_all_single(x, x, group=group)
    return [
        (whole, torch.arange(1.0, size + 1)[:, None].expand(size, 3)),
        (outs, [torch.full((3,), r + 1.0) for r in range(size)]),
        (mine, torch.arange(3.0 * rank, 3 * rank + 3) * size),
        (x, torch.arange(float(size)) * 10 + rank),
    ]


@scenario(gloo_cannot="it writes to no parameter")
def outputs_that_are_parameters_or_views(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    one = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(one, size - 1, group=group)
    several = [torch.nn.Parameter(torch.zeros(3)) for _ in range(size)]
    dist.all_gather(several, torch.full((3,), rank + 1.0), group=group)
    flat = torch.zeros(size * 3)
    dist.all_gather(list(flat.chunk(size)), torch.full((3,), rank + 1.0), group=group)
    want = torch.arange(1.0, size + 1)[:, None].expand(size, 3)
    return [
        (one, torch.full((3,), size - 1.0)),
        (one.is_leaf, True),
        (several, [*want]),
        (flat.reshape(size, 3), want),
    ]


@scenario(gloo_cannot="it gathers nothing without dimensions")
def gathers_without_dimensions(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    out, part = torch.empty(size), torch.tensor(0.0)
    dist.all_gather_into_tensor(out, torch.tensor(float(rank)), group=group)
    dist.reduce_scatter_tensor(part, torch.arange(float(size)), group=group)
    return [(out, torch.arange(float(size))), (part, torch.tensor(float(rank * size)))]


@scenario(gloo_cannot="its single tensors are joined rows, not stacks")
def single_tensors_that_are_stacks(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    out, stack = torch.empty(2, 3), torch.empty(size, 2, 3)
    x = torch.arange(6.0 * size).reshape(size, 2, 3)
    dist.reduce_scatter_tensor(out, x, group=group)
    dist.all_gather_into_tensor(stack, x[rank], group=group)
    return [(out, x[rank] * size), (stack, x)]


@scenario(gloo_cannot="its sparse sums have no AVG")
def means_of_sparse_tensors(group: Any) -> Any:
    size = dist.get_world_size(group)
    x = torch.sparse_coo_tensor([[1]], [float(dist.get_rank(group))], (3,))
    dist.all_reduce(x, OP.AVG, group=group)
    return [(x.to_dense(), torch.tensor([0.0, (size - 1) / 2, 0.0]))]


@scenario(gloo_cannot="what it coalesces must have one type")
def coalesced_sums_of_many_types(group: Any) -> Any:
    size = dist.get_world_size(group)
    total = size * (size + 1) / 2
    mine = dist.get_rank(group) + 1.0
    found = [torch.full((n,), mine, dtype=d) for n in (0, 3, 70_000) for d in FLOATS]
    with dist._coalescing_manager(group=group):
        for x in found:
            dist.all_reduce(x, group=group)
    after = torch.ones(3)
    dist.all_reduce(after, group=group)
    want = [torch.full_like(x, total) for x in found]
    return [(found, want), (after, torch.full((3,), float(size)))]


@scenario()
def coalesced_gathers_and_scatters(group: Any) -> Any:
    size = dist.get_world_size(group)
    outs = [torch.empty(size * n) for n in (1, 5)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for out in outs:
            mine = numbers(group, out.numel() // size)
            dist.all_gather_into_tensor(out, mine, group=group)
    manager.wait()
    parts = [torch.empty(n) for n in (1, 5)]
    with dist._coalescing_manager(group=group):
        for part in parts:
            every = numbers(group, size * part.numel())
            dist.reduce_scatter_tensor(part, every, group=group)
    return [outs, parts]


@scenario(gloo_cannot="it has no coalescing by a device")
def coalesced_broadcasts(group: Any) -> Any:
    size, mine = dist.get_world_size(group), float(dist.get_rank(group))
    a, b = torch.full((3,), mine), torch.full((2,), mine)
    with dist._coalescing_manager(
        group=group, device=torch.device("cpu"), async_ops=True
    ) as both:
        dist.broadcast(a, 0, group=group)
        dist.broadcast(b, size - 1, group=group)
    both.wait()
    return [(a, torch.zeros(3)), (b, torch.full((2,), size - 1.0))]


@scenario()
def coalesced_sums_of_one_type(group: Any) -> Any:
    found = [numbers(group, count) for count in (0, 3, 70_000)]
    with dist._coalescing_manager(group=group):
        for x in found:
            dist.all_reduce(x, group=group)
    after = numbers(group, 3)
    dist.all_reduce(after, group=group)
    return [found, after]


@scenario()
def gathers_into_what_inductor_has_allocated(group: Any) -> Any:
    """What compiled programs call where their gathers are put together."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    out = torch.empty(2 * size)
    gathers = torch.ops._c10d_functional.all_gather_into_tensor_out
    mine = torch.full((2,), float(rank))
    return funcol.wait_tensor(gathers(mine, size, group.group_name, out=out)) + 0
