# SPDX-License-Identifier: Apache-2.0
"""Collectives of a process group: every type, reduction, form and layout of tensors.

A launch takes seconds, so each runs many cases and returns those that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process_groups import job, unequal

DEADLINE_S = 90.0
COUNTS = (0, 1, 7, 4099)
SIZES = (1, 2, 3)
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
TYPES = (*FLOATS, *INTEGERS, *COMPLEX, "bool")
OP = dist.ReduceOp


def values(rank: int, count: int, name: str) -> torch.Tensor:
    """Return small numbers: sums and products of some of them are exact everywhere."""
    dtype = getattr(torch, name)
    numbers = (torch.arange(count) * 7 + rank * 3) % 5
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers + rank).double()).to(dtype)
    return (numbers > 2) if dtype is torch.bool else numbers.to(dtype)


def combined(op: Any, size: int, count: int, name: str) -> torch.Tensor:
    """Return the reduction of all ranks' values, in a wide type."""
    wide = torch.complex128 if name in COMPLEX else torch.float64
    inputs = [values(rank, count, name) for rank in range(size)]
    if op in (OP.BAND, OP.BOR, OP.BXOR):
        result = inputs[0].to(torch.int64)
        for other in inputs[1:]:
            one = other.to(torch.int64)
            result = (
                result & one
                if op is OP.BAND
                else (result | one if op is OP.BOR else result ^ one)
            )
        return result.to(getattr(torch, name))
    stack = torch.stack([one.to(wide) for one in inputs])
    if op is OP.MIN or op is OP.MAX:
        result = stack.amin(0) if op is OP.MIN else stack.amax(0)
    elif op is OP.PRODUCT:
        result = stack.prod(0)
    else:
        result = stack.sum(0)
        result = result / size if op is OP.AVG else result
    if name == "bool":
        return result != 0
    if op is OP.AVG and name in INTEGERS:
        result = result.trunc()
    return result.to(getattr(torch, name))


def reductions_of(name: str) -> list[Any]:
    if name in COMPLEX:
        return [OP.SUM, OP.AVG]
    if name == "bool":
        return [OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, OP.BAND, OP.BOR, OP.BXOR]
    ops = [OP.SUM, OP.AVG, OP.PRODUCT, OP.MIN, OP.MAX]
    return ops + ([OP.BAND, OP.BOR, OP.BXOR] if name in INTEGERS else [])


def run_reductions(rank: int, size: int) -> list[str]:
    wrong = []
    for name in TYPES:
        for op in reductions_of(name):
            for count in COUNTS:
                wrong += check_reductions(rank, size, name, op, count)
    return wrong


def check_reductions(rank: int, size: int, name: str, op: Any, count: int) -> list[str]:
    """Return which operations are wrong."""
    want = combined(op, size, count, name)
    x = values(rank, count, name)
    dist.all_reduce(x, op)
    found = {"all_reduce": (x, want)}
    x = values(rank, count, name)
    work = dist.all_reduce(x, op, async_op=True)
    work.wait()
    found["async"] = (x, want)
    root = size - 1
    x = values(rank, count, name)
    dist.reduce(x, root, op)
    if rank == root:
        found["reduce"] = (x, want)
    parts = [values(rank, count, name) for _ in range(size)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, op)
    found["reduce_scatter"] = (out, want)
    out = torch.empty_like(parts[0])
    joined = torch.cat(parts)
    if not out.is_complex():
        dist.reduce_scatter_single(out, joined, op)
        found["reduce_scatter_single"] = (out, want)
    case = f"{name} {op} {count}"
    return [
        f"{case}: {text}"
        for what, (got, wanted) in found.items()
        for text in unequal(got, wanted, 2e-2 if name in FLOATS[:2] else 1e-6, what)
    ]


MOVED = (*TYPES, "float8_e4m3fn", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32")


def pattern(rank: int, count: int, name: str) -> torch.Tensor:
    """Return any bits, of a type that need have no arithmetic."""
    dtype = getattr(torch, name)
    if dtype is torch.bool:
        return values(rank, count, name)
    nbytes = count * dtype.itemsize
    bits = (torch.arange(nbytes) * 3 + rank * 17 + 1).to(torch.uint8)
    return bits.view(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def run_moves(rank: int, size: int) -> list[str]:
    wrong = []
    for name in MOVED:
        for count in COUNTS:
            found = moves(rank, size, count, name)
            wrong += [
                f"{name} {count}: {what}"
                for what, (got, want) in found.items()
                if not torch.equal(as_bytes(got), as_bytes(want))
            ]
    return wrong


def moves(
    rank: int, size: int, count: int, name: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return what each operation brought, and what it should have."""
    mine = pattern(rank, count, name)
    everyone = torch.cat([as_bytes(pattern(r, count, name)) for r in range(size)])
    found = {}
    x = pattern(rank, count, name)
    dist.broadcast(x, size - 1)
    found["broadcast"] = (x, pattern(size - 1, count, name))
    outs = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(outs, mine)
    found["all_gather"] = (torch.cat([*map(as_bytes, outs)]), everyone)
    out = torch.empty(size * count, dtype=mine.dtype)
    dist.all_gather_single(out, mine)
    found["all_gather_single"] = (out, everyone)
    if name != "complex32":  # torch makes no real view of it
        outs = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
        dist.gather(mine, outs, 0)
        if outs is not None:
            found["gather"] = (torch.cat([*map(as_bytes, outs)]), everyone)
    out = torch.empty_like(mine)
    parts = [pattern(r, count, name) for r in range(size)] if rank == 0 else None
    dist.scatter(out, parts, 0)
    found["scatter"] = (out, pattern(rank, count, name))
    sent = [pattern(rank * size + r, count, name) for r in range(size)]
    outs = [torch.empty_like(mine) for _ in range(size)]
    dist.all_to_all(outs, sent)
    want = torch.cat(
        [as_bytes(pattern(r * size + rank, count, name)) for r in range(size)]
    )
    found["all_to_all"] = (torch.cat([*map(as_bytes, outs)]), want)
    out = torch.empty(size * count, dtype=mine.dtype)
    flat = torch.cat([*map(as_bytes, sent)]).view(mine.dtype)
    dist.all_to_all_single(out, flat)
    found["all_to_all_single"] = (out, want)
    return found


# -- what NCCL's users pass ----------------------------------------------------------


def scalars(rank: int, size: int) -> list[bool]:
    out = torch.zeros(size)
    dist.all_gather_single(out, torch.tensor(float(rank)))
    total = torch.tensor(1.0 + rank)
    dist.all_reduce(total)
    part = torch.tensor(0.0)
    dist.reduce_scatter_single(part, torch.arange(float(size)))
    return [
        out.tolist() == [*range(size)],
        float(total) == size * (size + 1) / 2,
        float(part) == rank * size,
    ]


def strided(rank: int, size: int) -> list[bool]:
    """Tensors of any strides, in and out."""
    base = torch.zeros(6, 4)
    view = base.t()[::2]  # neither rows nor columns lie together
    view.fill_(rank + 1.0)
    dist.all_reduce(view)
    total = size * (size + 1) / 2
    kept = base.t()[1::2]
    moved = torch.full((5, 3), float(rank)).t()
    dist.broadcast(moved, 0)
    columns = torch.zeros(4, size).t()
    dist.all_gather_single(columns, torch.arange(4.0) + rank)
    want = torch.stack([torch.arange(4.0) + r for r in range(size)])
    conj = torch.full((3,), complex(1, 1 + rank)).conj()
    gathered = [torch.zeros(3, dtype=conj.dtype) for _ in range(size)]
    dist.group.WORLD.allgather([gathered], [conj]).wait()
    return [
        bool((view == total).all()) and bool((kept == 0).all()),
        bool((moved == 0).all()),
        torch.equal(columns, want),
        all(bool((g == complex(1, -1 - r)).all()) for r, g in enumerate(gathered)),
    ]


def aliases(rank: int, size: int) -> list[bool]:
    """Inputs among the outputs, parameters as outputs, several views of one tensor."""
    whole = torch.zeros(size, 3)
    whole[rank] = rank + 1.0
    dist.all_gather_single(whole, whole[rank])  # NCCL's form of in place
    in_place = [row.tolist() for row in whole]
    outs = [torch.zeros(3) for _ in range(size)]
    outs[rank].fill_(rank + 1.0)
    dist.all_gather(outs, outs[rank])
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(parameter, size - 1)
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(size)]
    dist.all_gather(parameters, torch.full((3,), rank + 1.0))
    flat = torch.zeros(size * 3)
    dist.all_gather(list(flat.chunk(size)), torch.full((3,), rank + 1.0))
    x = torch.arange(float(size)) + 10 * rank
    dist.all_to_all_single(x, x)
    total = torch.arange(3.0 * size)
    dist.reduce_scatter_single(total[3 * rank : 3 * rank + 3], total)
    want = [[r + 1.0] * 3 for r in range(size)]
    block = torch.arange(3.0 * rank, 3 * rank + 3) * size
    return [
        in_place == want,
        [o.tolist() for o in outs] == want,
        parameter.tolist() == [size - 1] * 3 and parameter.is_leaf,
        [p.tolist() for p in parameters] == want,
        flat.reshape(size, 3).tolist() == want,
        x.tolist() == [10 * r + rank for r in range(size)],
        torch.equal(total[3 * rank : 3 * rank + 3], block),
    ]


def uneven(rank: int, size: int) -> list[bool]:
    """Lists and splits of different lengths, empty ones included."""
    counts = [[(a * 2 + b) % 4 for b in range(size)] for a in range(size)]
    sent = [torch.full((counts[rank][b],), 10.0 * rank + b) for b in range(size)]
    got = [torch.zeros(counts[a][rank]) for a in range(size)]
    dist.all_to_all(got, sent)
    want = [[10.0 * a + rank] * counts[a][rank] for a in range(size)]
    rows = torch.cat([one[:, None].expand(-1, 2) for one in sent])
    out = torch.zeros(sum(counts[a][rank] for a in range(size)), 2)
    received = [counts[a][rank] for a in range(size)]
    dist.all_to_all_single(out, rows, received, counts[rank])
    again = torch.zeros_like(out)  # arrays, as Megatron-core passes them
    dist.all_to_all_single(again, rows, np.array(received), np.array(counts[rank]))
    outs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
    parts = [torch.full((r + 1,), rank + 1.0) for r in range(size)]
    mine = torch.zeros(rank + 1)
    dist.reduce_scatter(mine, parts)
    return [
        [g.tolist() for g in got] == want,
        out[:, 1].tolist() == [x for part in want for x in part],
        torch.equal(again, out),
        [o.tolist() for o in outs] == [[float(r)] * (r + 1) for r in range(size)],
        mine.tolist() == [size * (size + 1) / 2] * (rank + 1),
    ]


def factors(rank: int, size: int) -> list[bool]:
    """PREMUL_SUM, with a number and with a tensor, in all three operations."""
    half = OP.PREMUL_SUM(0.5)
    x = torch.full((4,), 2.0 * (rank + 1))
    dist.all_reduce(x, half)
    out = torch.zeros(2)
    dist.reduce_scatter_single(out, torch.full((2 * size,), rank + 1.0), half)
    low = torch.ones(3, dtype=torch.bfloat16)
    dist.all_reduce(low, OP.PREMUL_SUM(torch.tensor(2.0)))
    total = size * (size + 1) / 2
    return [
        x.tolist() == [total] * 4,
        out.tolist() == [total / 2] * 2,
        low.tolist() == [2.0 * size] * 3,
    ]


def sparse(rank: int, size: int) -> list[bool]:
    """COO tensors: of elements, of rows, with entries that come twice, of nothing."""
    torch.sparse.check_sparse_tensor_invariants.enable()
    x = torch.sparse_coo_tensor([[0, rank + 1, 0]], [1.0, 2.0, 3.0], (size + 2,))
    dist.all_reduce(x)
    want = torch.tensor([4.0 * size, *[2.0] * size, 0.0])
    rows = torch.sparse_coo_tensor([[rank, 5]], [[1.0, 2.0], [3.0, 4.0]], (8, 2))
    work = dist.all_reduce(rows, async_op=True)
    work.wait()
    dense = torch.zeros(8, 2)
    dense[:size] = torch.tensor([1.0, 2.0])
    dense[5] += torch.tensor([3.0, 4.0]) * size
    empty = torch.sparse_coo_tensor(torch.zeros(2, 0), [], (3, 3))
    dist.all_reduce(empty)
    mean = torch.sparse_coo_tensor([[1]], [float(rank)], (3,))
    dist.all_reduce(mean, OP.AVG)
    return [
        torch.equal(x.to_dense(), want),
        torch.equal(rows.to_dense(), dense) and rows.is_sparse,
        not bool(empty.to_dense().any()),
        mean.to_dense().tolist() == [0.0, (size - 1) / 2, 0.0],
    ]


def coalesced(rank: int, size: int) -> list[bool]:
    """Several calls as one, in each of torch's ways."""
    total = size * (size + 1) / 2
    tensors = [
        torch.full((n,), rank + 1.0, dtype=d)
        for n in (0, 3, 70_000)
        for d in (torch.float32, torch.bfloat16)
    ]
    with dist._coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    found = [all(bool((x == total).all()) for x in tensors)]
    outs = [torch.zeros(size * n) for n in (1, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            mine = torch.full((out.numel() // size,), float(rank))
            dist.all_gather_single(out, mine)
    manager.wait()
    found.append(
        all(o.tolist() == sorted(o.tolist()) and o[-1] == size - 1 for o in outs)
    )
    parts = [torch.zeros(n) for n in (1, 5)]
    with dist._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_single(part, torch.ones(size * part.numel()))
    found.append(all(bool((part == size).all()) for part in parts))
    a, b = torch.full((3,), float(rank)), torch.full((2,), float(rank))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as both:
        dist.broadcast(a, 0)
        dist.broadcast(b, size - 1)
    both.wait()
    found.append(bool((a == 0).all()) and bool((b == size - 1).all()))
    x = torch.ones(3)
    dist.all_reduce(x)  # afterwards, all is as before
    found.append(x.tolist() == [size] * 3)
    return found


def objects(rank: int, size: int) -> list[bool]:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    listed = [rank, "from", rank] if rank == 0 else [None] * 3
    dist.broadcast_object_list(listed, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [*range(size)] if rank == 0 else None, 0)
    roots: Any = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, roots, 0)
    return [
        [g["rank"] for g in gathered] == [*range(size)],
        listed == [0, "from", 0],
        mine == [rank],
        roots is None or roots == [2 * r for r in range(size)],
    ]


def works(rank: int, size: int) -> list[bool]:
    """What a Work says before and after, and what its future gives."""
    x = torch.full((1000,), rank + 1.0)
    work = dist.all_reduce(x, async_op=True)
    ended = work.wait()
    future = work.get_future()
    later = future.then(lambda f: f.value()[0].sum().item())
    nested = (
        dist.all_reduce(torch.ones(1), async_op=True)
        .get_future()
        .then(
            lambda f: (
                dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0]
            )
        )
    )
    total = size * (size + 1) / 2
    synchronous = dist.group.WORLD.allreduce(x)  # in the form of programs of old
    synchronous.wait()
    return [
        ended is True and work.is_completed() and work.is_success(),
        work.exception() is None and work.result()[0] is x,
        future.value()[0] is x or torch.equal(future.value()[0], x),
        later.wait() == 1000 * total,
        nested.wait().tolist() == [size * size],
        bool((x == total * size).all()),
    ]


SCENES: list[Callable[[int, int], list[bool]]] = [
    *(scalars, strided, aliases, uneven, factors, sparse, coalesced, objects, works),
]


def run_everything() -> list[Any]:
    with job() as rank:
        size = dist.get_world_size()
        scenes = {scene.__name__: scene(rank, size) for scene in SCENES}
        return [run_reductions(rank, size), run_moves(rank, size), scenes]


@pytest.mark.parametrize("size", SIZES)
def test_every_type_and_reduction_and_what_nccls_programs_pass(
    torchrun: Any, size: int
) -> None:
    for reductions, moved, scenes in torchrun(
        size, run_everything, deadline_s=DEADLINE_S
    ):
        assert reductions == []
        assert moved == []
        assert [name for name, right in scenes.items() if not all(right)] == [], scenes
