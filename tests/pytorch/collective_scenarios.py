# SPDX-License-Identifier: Apache-2.0
"""Scenarios of collectives: methods of both generations, types, reductions, layouts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from scenarios import numbers, scenario

OP = dist.ReduceOp
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
COUNTS = (0, 1, 7, 4099)


# -- reductions ----------------------------------------------------------------------


@scenario()
def all_reduce_sum_of_any_length(group: Any) -> Any:
    found = [numbers(group, count) for count in (*COUNTS, 300_001)]
    for x in found:
        dist.all_reduce(x, group=group)
    return found


@scenario()
def all_reduce_of_floats(group: Any) -> Any:
    found = []
    for dtype in FLOATS:
        for op in (OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, OP.AVG):
            x = numbers(group, 7, dtype)
            dist.all_reduce(x, op, group=group)
            found.append(x)
    return found


@scenario()
def all_reduce_of_integers(group: Any) -> Any:
    found = []
    for dtype in INTEGERS:
        for op in (OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, OP.BAND, OP.BOR, OP.BXOR):
            x = numbers(group, 7, dtype)
            dist.all_reduce(x, op, group=group)
            found.append(x)
    return found


@scenario()
def all_reduce_of_bools(group: Any) -> Any:
    found = []
    for op in (OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX):
        x = numbers(group, 7, torch.bool)
        dist.all_reduce(x, op, group=group)
        found.append(x)
    return found


@scenario()
def all_reduce_of_complex_numbers(group: Any) -> Any:
    found = [numbers(group, 7, torch.complex64), numbers(group, 7, torch.complex128)]
    for x in found:
        dist.all_reduce(x, group=group)
    return found


@scenario()
def all_reduce_without_dimensions(group: Any) -> Any:
    x = torch.tensor(1.5 + dist.get_rank(group))
    dist.all_reduce(x, group=group)
    return x


@scenario()
def all_reduce_of_many_dimensions(group: Any) -> Any:
    x = numbers(group, 210).reshape(2, 3, 5, 7)
    dist.all_reduce(x, OP.MAX, group=group)
    return x


@scenario()
def all_reduce_that_needs_a_gradient(group: Any) -> Any:
    x = numbers(group, 5).requires_grad_()
    with torch.no_grad():
        dist.all_reduce(x, group=group)
    return [x.detach(), x.requires_grad, x.is_leaf]


@scenario()
def all_reduce_coalesced_of_a_list(group: Any) -> Any:
    found = [numbers(group, count) for count in (3, 1, 50_000)]
    dist.all_reduce_coalesced(found, OP.MAX, group=group)
    return found


@scenario()
def reduce_to_every_root(group: Any) -> Any:
    found = []
    for root in range(dist.get_world_size(group)):
        for op in (OP.SUM, OP.MAX):
            x = numbers(group, 7, torch.int64)
            dist.reduce(x, root, op, group=group)
            # What others hold afterwards is nobody's.
            found.append(x if root == dist.get_rank(group) else None)
    return found


@scenario()
def reduce_scatter_of_a_list(group: Any) -> Any:
    found = []
    for count in COUNTS:
        parts = [numbers(group, count) + r for r in range(dist.get_world_size(group))]
        out = torch.empty(count)
        dist.reduce_scatter(out, parts, group=group)
        found.append(out)
    return found


@scenario()
def reduce_scatter_tensor_of_any_op(group: Any) -> Any:
    found = []
    for op in (OP.SUM, OP.MAX, OP.AVG):
        for dtype in FLOATS:
            out = torch.empty(3, dtype=dtype)
            x = numbers(group, 3 * dist.get_world_size(group), dtype)
            dist.reduce_scatter_tensor(out, x, op, group=group)
            found.append(out)
    return found


@scenario()
def reduce_scatter_tensor_of_rows(group: Any) -> Any:
    size = dist.get_world_size(group)
    out = torch.empty(2, 3)
    x = numbers(group, 6 * size).reshape(2 * size, 3)
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


# -- moving --------------------------------------------------------------------------


@scenario()
def broadcast_from_every_root(group: Any) -> Any:
    found = []
    for root in range(dist.get_world_size(group)):
        for dtype in (*FLOATS, *INTEGERS, torch.complex64, torch.bool):
            x = numbers(group, 7, dtype)
            dist.broadcast(x, root, group=group)
            found.append(x)
    return found


@scenario()
def broadcast_of_any_length(group: Any) -> Any:
    found = [numbers(group, count) for count in (*COUNTS, 300_001)]
    for x in found:
        dist.broadcast(x, dist.get_world_size(group) - 1, group=group)
    return found


@scenario()
def all_gather_of_a_list(group: Any) -> Any:
    found = []
    for dtype in (*FLOATS, torch.int64, torch.bool, torch.complex128):
        for count in COUNTS:
            x = numbers(group, count, dtype)
            outs = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
            dist.all_gather(outs, x, group=group)
            found.append(outs)
    return found


@scenario()
def all_gather_into_one_tensor(group: Any) -> Any:
    size = dist.get_world_size(group)
    found = []
    for dtype in (*FLOATS, torch.int64, torch.bool):
        x = numbers(group, 6, dtype).reshape(2, 3)
        out = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(out, x, group=group)
        found.append(out)
    return found


@scenario()
def gather_to_every_root(group: Any) -> Any:
    found = []
    size = dist.get_world_size(group)
    for root in range(size):
        x = numbers(group, 7)
        mine = root == dist.get_rank(group)
        outs = [torch.empty_like(x) for _ in range(size)] if mine else None
        dist.gather(x, outs, root, group=group)
        found.append(outs)
    return found


@scenario()
def scatter_from_every_root(group: Any) -> Any:
    found = []
    size = dist.get_world_size(group)
    for root in range(size):
        out = torch.empty(7)
        mine = root == dist.get_rank(group)
        parts = [numbers(group, 7) + r for r in range(size)] if mine else None
        dist.scatter(out, parts, root, group=group)
        found.append(out)
    return found


@scenario()
def all_to_all_single_of_equal_parts(group: Any) -> Any:
    found = []
    for count in COUNTS:
        x = numbers(group, count * dist.get_world_size(group))
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        found.append(out)
    return found


@scenario()
def all_to_all_single_of_uneven_rows(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = [[(a * 2 + b) % 4 for b in range(size)] for a in range(size)]
    received = [counts[a][rank] for a in range(size)]
    x = numbers(group, 3 * sum(counts[rank])).reshape(-1, 3)
    out = torch.empty(sum(received), 3)
    dist.all_to_all_single(out, x, received, counts[rank], group=group)
    return out


@scenario()
def all_to_all_single_by_splits_of_numpy(group: Any) -> Any:
    """Megatron-core passes arrays for lists of lengths; gloo takes lists alone."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = np.add.outer(np.arange(size), np.arange(size)) % 3
    sent, received = counts[rank], counts[:, rank]
    if dist.get_backend(group) == "gloo":
        sent, received = sent.tolist(), received.tolist()
    x = numbers(group, 2 * int(sum(sent))).reshape(-1, 2)
    out = torch.empty(int(sum(received)), 2)
    dist.all_to_all_single(out, x, received, sent, group=group)
    return out


@scenario()
def all_to_all_single_by_splits_that_come_again(group: Any) -> Any:
    """Rows of any shape; none for some ranks, and in one turn for no rank at all."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    found = []
    for row in ((), (3,), (2, 2), (0,)):
        for factor in (1, 1, 5, 0, 1):
            counts = [
                [factor * ((a + 2 * b) % 3) for b in range(size)] for a in range(size)
            ]
            received = [counts[a][rank] for a in range(size)]
            shape = sum(counts[rank]), *row
            x = numbers(group, math.prod(shape)).reshape(shape)
            out = torch.zeros(sum(received), *row)
            dist.all_to_all_single(out, x, received, counts[rank], group=group)
            work = dist.all_to_all_single(
                x, out, counts[rank], received, group=group, async_op=True
            )
            work.wait()  # brings all of it back
            found += [out, x]
    return found


@scenario()
def all_to_all_of_equal_lists(group: Any) -> Any:
    size = dist.get_world_size(group)
    sent = [numbers(group, 5) * 10 + r for r in range(size)]
    outs = [torch.empty(5) for _ in range(size)]
    dist.all_to_all(outs, sent, group=group)
    return outs


@scenario()
def objects_to_all_and_to_one(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank}, group=group)
    listed = [rank, "from", rank] if rank == 0 else [None] * 3
    dist.broadcast_object_list(listed, 0, group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [*range(size)] if rank == 0 else None, 0, group)
    roots: Any = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, roots, 0, group=group)
    return [everyone, listed, mine, roots]


# -- methods of a group, by both generations of their names --------------------------


def by_each_name(group: Any, *names: str) -> list[Any]:
    """Return the methods of these names that a group has; newer torch drops some."""
    return [getattr(group, name) for name in names if hasattr(type(group), name)]


@scenario()
def methods_that_gather(group: Any) -> Any:
    size = dist.get_world_size(group)
    found = []
    for method in by_each_name(group, "_allgather_base", "all_gather_single"):
        out = torch.empty(size * 4)
        method(out, numbers(group, 4)).wait()
        found.append(out)
    both = ("allgather_into_tensor_coalesced", "all_gather_single_coalesced")
    for method in by_each_name(group, *both):
        outs = [torch.empty(size * count) for count in (1, 5)]
        method(outs, [numbers(group, count) for count in (1, 5)]).wait()
        found.append(outs)
    lists = [[torch.empty(3), torch.empty(2)] for _ in range(size)]
    group.allgather_coalesced(lists, [numbers(group, 3), numbers(group, 2)]).wait()
    return [*found, lists]


@scenario()
def methods_that_reduce_and_scatter(group: Any) -> Any:
    size = dist.get_world_size(group)
    found = []
    for method in by_each_name(group, "_reduce_scatter_base", "reduce_scatter_single"):
        out = torch.empty(4)
        method(out, numbers(group, size * 4)).wait()
        found.append(out)
    both = ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
    for method in by_each_name(group, *both):
        outs = [torch.empty(count) for count in (1, 5)]
        method(outs, [numbers(group, size * count) for count in (1, 5)]).wait()
        found.append(outs)
    return found


@scenario()
def methods_that_exchange(group: Any) -> Any:
    size = dist.get_world_size(group)
    found = []
    for method in by_each_name(group, "alltoall_base", "all_to_all_single"):
        out = torch.empty(size * 2)
        method(out, numbers(group, size * 2), [], []).wait()
        found.append(out)
    outs = [torch.empty(2) for _ in range(size)]
    group.alltoall(outs, [numbers(group, 2) + r for r in range(size)]).wait()
    return [*found, outs]


@scenario()
def methods_called_as_of_old(group: Any) -> Any:
    """One tensor, a reduction or a root, and no options."""
    x, y, z = (numbers(group, 3) for _ in range(3))
    group.allreduce(x).wait()
    group.allreduce([y], OP.MAX).wait()
    group.broadcast(z, 0).wait()
    out = [torch.empty(3) for _ in range(dist.get_world_size(group))]
    group.allgather(out, numbers(group, 3)).wait()
    group.barrier().wait()
    return [x, y, z, out]


# -- functional collectives ----------------------------------------------------------


@scenario()
def functional_collectives(group: Any) -> Any:
    size = dist.get_world_size(group)
    x = numbers(group, 4 * size)
    return [
        found + 0
        for found in (
            funcol.all_reduce(x, "sum", group),
            funcol.all_gather_single(x, 0, group),
            funcol.all_gather_single(x.reshape(2, -1), 1, group),
            funcol.reduce_scatter_single(x, "avg", 0, group),
            funcol.reduce_scatter_single(x.reshape(2, -1), "sum", 1, group),
            funcol.broadcast(x, size - 1, group),
            funcol.all_to_all_single(x, None, None, group),
            *funcol.all_reduce_coalesced([x, x * 2], "max", group),
            *funcol.all_gather_into_tensor_coalesced([x, x * 2], group),
            *funcol.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group),
        )
    ]


@scenario()
def gradients_of_functional_collectives(group: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    found = []
    for call in (
        lambda y: funcol.all_to_all_single_autograd(y, None, None, group),
        lambda y: funcol.all_gather_single_autograd(y, 0, group),
        lambda y: funcol.reduce_scatter_single_autograd(y, "sum", 0, group),
    ):
        y = numbers(group, 2 * size).requires_grad_()
        (call(y * 2) * (rank + 1)).sum().backward()
        found.append(y.grad)
    return found


# -- sparse tensors ------------------------------------------------------------------


@scenario()
def sparse_elements(group: Any) -> Any:
    """Entries of different ranks meet, and some come twice."""
    at = dist.get_rank(group) + 1
    x = torch.sparse_coo_tensor([[0, at, 0]], [1.0, 2.0, 3.0], (9,))
    dist.all_reduce(x, group=group)
    return x.coalesce().to_dense()


@scenario()
def sparse_rows(group: Any) -> Any:
    at = dist.get_rank(group)
    x = torch.sparse_coo_tensor([[at, 7]], numbers(group, 6).reshape(2, 3), (8, 3))
    dist.all_reduce(x, group=group)
    return x.coalesce().to_dense()


@scenario()
def sparse_sums_under_way(group: Any) -> Any:
    x = torch.diag(numbers(group, 4)).to_sparse()
    dist.all_reduce(x, group=group, async_op=True).wait()
    return [x.is_sparse, x.coalesce()]


@scenario()
def sparse_tensors_of_nothing(group: Any) -> Any:
    """Of nothing on all ranks, and of nothing on some."""
    empty = torch.sparse_coo_tensor(torch.zeros(2, 0), [], (3, 3))
    dist.all_reduce(empty, group=group)
    own = 3 * (dist.get_rank(group) == 0)
    some = torch.sparse_coo_tensor([[*range(own)]], [1.0] * own, (5,))
    dist.all_reduce(some, group=group)
    return [empty.to_dense(), some.to_dense()]


@scenario()
def sparse_tensors_of_two_dimensions(group: Any) -> Any:
    dense = torch.diag(numbers(group, 6).double()) * (dist.get_rank(group) + 1)
    x = dense.to_sparse()
    dist.all_reduce(x, group=group)
    return x.to_dense()


@scenario(gloo_cannot="what is copied into torch's view of pairs is lost")
def sparse_complex_numbers(group: Any) -> Any:
    """torch passes a complex tensor as one of pairs; the sum is to be in the former."""
    size, at = dist.get_world_size(group), dist.get_rank(group)
    found = []
    for dtype in (torch.complex64, torch.complex128):
        x = torch.sparse_coo_tensor(
            [[0, at]], torch.tensor([1j, 2.0], dtype=dtype), (size,)
        )
        want = torch.full((size,), 2.0, dtype=dtype)
        want[0] += size * 1j
        dist.all_reduce(x, group=group)
        row = torch.tensor([[1 + 2j, 3]], dtype=dtype)
        y = torch.sparse_coo_tensor([[1]], row, (2, 2))
        dist.all_reduce(y, OP.AVG, group=group, async_op=True).wait()
        found.append((x.to_dense(), want))
        found.append((y.to_dense(), torch.stack([torch.zeros(2, dtype=dtype), row[0]])))
    return found


@scenario()
def sparse_rows_without_width(group: Any) -> Any:
    x = torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 0), (3, 0))
    dist.all_reduce(x, group=group)
    return x.to_dense()


@scenario()
def sparse_tensors_without_sparse_dimensions(group: Any) -> Any:
    nothing = torch.zeros(0, 1, dtype=torch.int64)
    scalar = torch.sparse_coo_tensor(nothing, torch.ones(1), ())
    row = torch.sparse_coo_tensor(nothing, torch.ones(1, 3), (3,))
    for x in (scalar, row):
        dist.all_reduce(x, group=group)
    return [scalar.to_dense(), row.to_dense()]
