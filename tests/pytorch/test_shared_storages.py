# SPDX-License-Identifier: Apache-2.0
"""Storages that are there already move into memory which the ranks share."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commrt.comm import core_of
from commrt.layers.data.ddp import HookState, reduce_bucket
from commrt.local import run
from commrt.torch import shared_storages
from commrt.torch.shared_storages import share_storage

DEADLINE_S = 300.0
COUNT = 20_001


def is_reached(comm: Any, address: int) -> bool:
    """Whether peers reach what lies at an address."""
    found = bool(core_of(comm).add_mirror(1, 8, address))
    core_of(comm).remove_mirror(1)
    return found


def moved(**_: Any) -> list[str]:
    """Return what is wrong; empty where nothing is."""
    wrong = []
    with job() as rank:
        comm = dist.group.WORLD.communicator
        size = comm.size
        x = torch.arange(COUNT, dtype=torch.float32) + rank
        part = x[5:].view(-1, 4)[1:]
        before, values = x.data_ptr(), x.clone()
        if not share_storage(core_of(comm), part):
            return ["not moved"]
        if not (x.data_ptr() != before and torch.equal(x, values)):
            wrong.append("values")
        if part.data_ptr() != x.data_ptr() + 9 * 4 or part[0, 0] != 9 + rank:
            wrong.append("a view")
        if not is_reached(comm, x.data_ptr()) or is_reached(comm, before):
            wrong.append("places")
        # Whole and in parts, by lengths that are shown and that are not.
        for count, op in (
            (COUNT - 1, "sum"),
            (COUNT - 1, "avg"),
            (3, "sum"),
            (0, "sum"),
        ):
            each = x[1 : 1 + count]
            want = sum(torch.arange(1, 1 + count) + r for r in range(size)) * 1.0
            each.copy_(torch.arange(1, 1 + count) + rank)
            comm.allreduce(each, out=each, op=op)
            if not torch.allclose(each, want / size if op == "avg" else want):
                wrong.append(f"{count} {op}: {each} {want}")
        part[0, 0] = 77
        if x[9] != 77:
            wrong.append("a view after calls")
        if share_storage(core_of(comm), x):
            wrong.append("moved twice")
        wrong += _given_back(comm, x)
        del part
    return wrong


def _given_back(comm: Any, x: torch.Tensor) -> list[str]:
    """A storage's memory comes back when nothing refers to it, and not before."""
    wrong = []
    first = torch.ones(300_000)
    share_storage(core_of(comm), first)
    address, nbytes = first.data_ptr(), core_of(comm).symmetric.heap.nbytes
    kept = first[10:20]
    del first
    gc.collect()
    other = comm.empty(300_000, "float32")
    other[:] = 5
    if not (kept == 1).all() or not is_reached(comm, address):
        wrong.append("a view keeps the memory")
    del kept, other
    gc.collect()
    if is_reached(comm, address):
        wrong.append("an address outlives its storage")
    for _ in range(40):
        again = torch.ones(300_000)
        if not share_storage(core_of(comm), again):
            wrong.append("not moved again")
    if core_of(comm).symmetric.heap.nbytes > nbytes + 8 * comm.size * 300_000 * 4:
        wrong.append(f"grew from {nbytes} to {core_of(comm).symmetric.heap.nbytes}")
    return wrong


@pytest.mark.parametrize("nranks", [2, 3])
def test_a_storage_moves_with_its_views(torchrun: Any, nranks: int) -> None:
    assert torchrun(nranks, moved, deadline_s=DEADLINE_S) == [[]] * nranks


def refused(**_: Any) -> list[str]:
    """Storages that stay where they are, on all ranks, and why."""
    found = []

    def try_it(why: str, x: torch.Tensor, **arguments: Any) -> None:
        address = x.data_ptr()
        if share_storage(core_of(comm), x, **arguments) or x.data_ptr() != address:
            found.append(why)

    with job() as rank:
        comm = dist.group.WORLD.communicator
        try_it("a rank does not want to", torch.ones(COUNT), may_move=rank != 1)
        try_it("no bytes", torch.ones(0))
        shared = torch.ones(COUNT)
        if rank == 0:
            shared.share_memory_()
        try_it("shared by torch", shared)
        space = os.statvfs
        if rank == 0:
            shared_storages.os.statvfs = lambda _: space("/proc")  # type: ignore
        try_it("no space for a copy", torch.ones(COUNT))
        shared_storages.os.statvfs = space
        core = core_of(comm)
        wanted = core.empty
        core.empty = lambda *_: wanted(1 << 60, "uint8")
        try_it("no memory", torch.ones(COUNT))
        core.empty = wanted
        if not share_storage(core_of(comm), torch.ones(COUNT)):
            found.append("nothing moves any more")
    return found


def test_what_one_rank_cannot_move_stays_on_all(torchrun: Any) -> None:
    assert torchrun(2, refused, deadline_s=DEADLINE_S) == [[]] * 2


def test_ranks_on_threads_share_no_pages() -> None:
    def rank_main(comm: Any) -> list[Any]:
        x = torch.full((COUNT,), 1.0 + comm.rank)
        found = share_storage(core_of(comm), x)
        return [found, float(comm.allreduce(x)[-1])]

    assert run(2, rank_main) == [[False, 3.0]] * 2


def no_shared_node(**_: Any) -> bool:
    with job():
        return share_storage(core_of(dist.group.WORLD.communicator), torch.ones(COUNT))


def test_ranks_on_several_nodes_have_no_memory_in_common(torchrun: Any) -> None:
    env = {"COMMRT_NODES": "1,1"}
    assert torchrun(2, no_shared_node, env=env, deadline_s=DEADLINE_S) == [False] * 2


# -- DDP's buckets -------------------------------------------------------------------


class Wide(nn.Module):
    """Layers whose gradients fill several buckets, and one that is too short."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(*(nn.Linear(120, 120) for _ in range(3)))
        self.last = nn.Linear(120, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.layers(x)))
        return out


def trained(options: dict[str, Any], views: bool, x: Any) -> tuple[Any, list[bool]]:
    """Return a model after five steps, and in which of them its buckets were shared."""
    state = HookState(**options)
    model = DistributedDataParallel(
        Wide(), bucket_cap_mb=0.05, gradient_as_bucket_view=views
    )
    shared: list[list[bool]] = []

    def hook(state: Any, bucket: Any) -> Any:
        future = reduce_bucket(state, bucket)
        buffer = bucket.buffer()
        if buffer.nbytes > 1 << 15:
            shared[-1].append(is_reached(state.comm, buffer.data_ptr()))
        return future

    hook.__annotations__ = reduce_bucket.__annotations__
    model.register_comm_hook(state, hook)
    for _ in range(5):
        shared.append([])
        model.zero_grad()
        model(x).square().mean().backward()
    state.close()
    return model, [bool(step) and all(step) for step in shared]


def buckets(**_: Any) -> list[str]:
    """Train with buckets that move; return what is wrong."""
    wrong = []
    with job() as rank:
        size = dist.get_world_size()
        alone = Wide()
        rows = [
            torch.randn(4, 120, generator=torch.Generator().manual_seed(each))
            for each in range(size)
        ]
        for each in rows:
            (alone(each).square().mean() / size).backward()
        ways: tuple[tuple[dict[str, Any], bool, bool], ...] = (
            ({}, False, True),
            ({}, True, False),
            ({"symmetric": False}, False, False),
            ({"compress": "bfloat16"}, False, False),
        )
        for options, views, moves in ways:
            model, shared = trained(options, views, rows[rank])
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            near = 1e-2 if "compress" in options else 1e-5
            if not all(torch.allclose(a.grad, b.grad, atol=near) for a, b in pairs):
                wrong.append(f"{options} {views}: gradients")
            # Of a length that the first step had, too, or of another one.
            settled = shared[-1] if moves else any(shared)
            if any(shared[:2]) or settled != moves:
                wrong.append(f"{options} {views}: {shared}")
    return wrong


@pytest.mark.parametrize("nranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_buckets_move_once_they_are_settled(torchrun: Any, nranks: int) -> None:
    assert torchrun(nranks, buckets, deadline_s=DEADLINE_S) == [[]] * nranks
