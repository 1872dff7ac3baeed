# SPDX-License-Identifier: Apache-2.0
"""Collectives of a process group: every type and reduction, against a wide type.

A launch takes seconds, so each runs many cases and returns those that are wrong. Forms
and layouts of tensors are in ``collective_scenarios.py`` and ``nccl_scenarios.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job, unequal

DEADLINE_S = 300.0
COUNTS = (0, 1, 7, 4099)
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


def run_everything() -> list[Any]:
    with job() as rank:
        size = dist.get_world_size()
        return [run_reductions(rank, size), run_moves(rank, size)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.full(sample=1)
def test_every_type_and_reduction(torchrun: Any, size: int) -> None:
    for reductions, moved in torchrun(size, run_everything, deadline_s=DEADLINE_S):
        assert reductions == []
        assert moved == []
