# SPDX-License-Identifier: Apache-2.0
"""Programs that inductor compiles: their collectives, joined and apart, beside gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from process_groups import differences, job
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEADLINE_S = 300.0
RANKS = 2


def forward(x: torch.Tensor, weights: list[torch.Tensor], group: Any) -> torch.Tensor:
    """Multiply by matrices of which each rank has some rows, and more."""
    for part in [funcol.all_gather_single(each, 0, group) for each in weights]:
        x = torch.tanh(x @ part)
    total = funcol.all_reduce(x * 2, "sum", group)
    mine = funcol.reduce_scatter_single(total + x, "avg", 0, group)
    return funcol.all_to_all_single(mine, None, None, group) + 1


def inputs() -> Any:
    torch.manual_seed(3)
    weights = [torch.randn(8, 8) for _ in range(3)]
    return torch.randn(8, 8), [w.chunk(RANKS)[dist.get_rank()] for w in weights]


def joined() -> Any:
    """Gathers are put together, into memory that the program has allocated."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    x, weights = inputs()
    group = dist.group.WORLD
    with config.patch(bucket_all_gathers_fx="all"):
        program = torch.compile(forward, fullgraph=True)
        found, sources = run_and_get_code(program, x, weights, group)
    assert "all_gather_into_tensor_out" in "".join(sources)
    torch.testing.assert_close(found, forward(x, weights, group))
    return found


def apart() -> Any:
    torch._dynamo.reset()
    return torch.compile(forward, fullgraph=True)(*inputs(), dist.group.WORLD)


def replicas() -> Any:
    """A compiled model under DDP: its graph is cut where buckets are full."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 600), nn.Linear(600, 4))
    model = torch.compile(DistributedDataParallel(layers, bucket_cap_mb=1))
    x, _ = inputs()
    model(x + dist.get_rank()).square().mean().backward()
    return [parameter.grad for parameter in layers.parameters()]


def run_compiled() -> list[str]:
    return differences([joined, apart, replicas])


@pytest.mark.full
def test_programs_that_inductor_compiles(torchrun: Any) -> None:
    assert torchrun(RANKS, run_compiled, deadline_s=DEADLINE_S) == [[]] * RANKS


# -- programs that are cut: what is called in between ---------------------------------


def cut_for_replicas() -> Any:
    """DDP cuts its buckets anew in the second step, within a compiled program."""
    found = []
    for how in (False, "ddp_optimizer", "python_reducer"):
        torch._dynamo.reset()
        torch.manual_seed(5)
        layers = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4))
        with torch._dynamo.config.patch(
            optimize_ddp=how, compiled_autograd=how == "python_reducer"
        ):
            replicas = DistributedDataParallel(layers)
            model = torch.compile(replicas, backend="aot_eager")
            optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
            x, _ = inputs()
            for step in range(4):
                optimizer.zero_grad()
                model(x + dist.get_rank() + step).square().mean().backward()
                optimizer.step()
        found.append([parameter.detach() for parameter in layers.parameters()])
    return found


def cut_by_messages() -> Any:
    """What dynamo does not trace: messages, works that are asked."""
    torch._dynamo.reset()

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x * 3
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        work = dist.broadcast(x, 1, async_op=True)
        while not work.is_completed():
            pass
        work.wait()
        dist.barrier()
        return x + 1

    return torch.compile(program, backend="aot_eager")(inputs()[0] + dist.get_rank())


def run_cut() -> list[str]:
    return differences([cut_for_replicas, cut_by_messages])


@pytest.mark.parametrize("how", ["", "COMMRT_TRACE", "COMMRT_DEBUG"])
@pytest.mark.full(sample=2)
def test_programs_that_are_cut_run_groups_as_they_are(
    torchrun: Any, tmp_path: Path, how: str
) -> None:
    """Also while a log is written, and in check mode: other methods are called."""
    value = {"COMMRT_TRACE": str(tmp_path / "log"), "COMMRT_DEBUG": "check"}
    env = {how: value[how]} if how else {}
    found = torchrun(RANKS, run_cut, deadline_s=DEADLINE_S, env=env)
    assert found == [[]] * RANKS


def gathered_into() -> list[bool]:
    """What joined gathers call, of groups of commrt and of C++, by name and object."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out
    found = []
    with job() as rank:
        size = dist.get_world_size()
        want = torch.arange(float(size)).repeat_interleave(3)
        for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
            for name in (group.group_name, group):
                out = torch.empty(3 * size)
                got = gather(torch.full((3,), float(rank)), size, name, out=out)
                found.append(torch.equal(funcol.wait_tensor(got), want))
                found.append(got.data_ptr() == out.data_ptr())
        out = torch.zeros(3 * size)
        mine = out.narrow(0, 3 * rank, 3).fill_(float(rank))
        funcol.wait_tensor(gather(mine, size, dist.group.WORLD.group_name, out=out))
        found.append(torch.equal(out, want))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_gathers_into_memory_of_the_caller(torchrun: Any, size: int) -> None:
    assert torchrun(size, gathered_into) == [[True] * 9] * size
