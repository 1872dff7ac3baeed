# SPDX-License-Identifier: Apache-2.0
"""What stands above process groups gives on commrt what it gives on gloo.

Each scenario runs on both within one launch, from the same seeds.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from process_groups import differences, job
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from commrt.comm import core_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which it uses
    from torch.distributed.optim import ZeroRedundancyOptimizer

DEADLINE_S = 300.0
LONG_S = 600.0
"""For many scenarios on a busy machine."""
RANKS = 2


class Net(nn.Module):
    """Two layers and one that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 4)
        self.other = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        """Return four numbers for each row."""
        hidden = torch.relu(self.first(x))
        found: torch.Tensor = (self.other if other else self.second)(hidden)
        return found


def made(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(7)
    return kind()


def rows(step: int, count: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(count, 8, generator=generator)


def trained(model: nn.Module, steps: int = 3, **calls: Any) -> list[torch.Tensor]:
    """Return the losses of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(rows(step), **calls).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def used(kind: Any = None) -> nn.Module:
    """Return a model all of whose parameters are used."""
    model = made()
    del model.other
    return model


# -- data parallel -------------------------------------------------------------------


def plain() -> Any:
    return trained(DistributedDataParallel(used()))


def small_buckets() -> Any:
    return trained(
        DistributedDataParallel(
            used(), bucket_cap_mb=0.0001, gradient_as_bucket_view=True
        )
    )


def static_graph() -> Any:
    return trained(DistributedDataParallel(used(), static_graph=True))


def unused_parameters() -> Any:
    model = DistributedDataParallel(made(), find_unused_parameters=True)
    return trained(model, other=False) + trained(model, other=True)


def no_sync() -> Any:
    model = DistributedDataParallel(used())
    with model.no_sync():
        model(rows(0)).sum().backward()
    model(rows(1)).sum().backward()
    return [p.grad for p in model.parameters()]


def compressing_hook() -> Any:
    model = DistributedDataParallel(used())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return trained(model)


def allreduce_hook() -> Any:
    model = DistributedDataParallel(used(), bucket_cap_mb=0.0001)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return trained(model)


def built_in_hooks() -> Any:
    """Hooks in C++, which ask works for futures with values of C++."""
    found = []
    for kind in (
        dist.BuiltinCommHookType.ALLREDUCE,
        dist.BuiltinCommHookType.FP16_COMPRESS,
    ):
        model = DistributedDataParallel(used(), bucket_cap_mb=0.0001)
        model._register_builtin_comm_hook(kind)
        found += trained(model)
    return found


def power_sgd(bucket_cap_mb: float = 25) -> Any:
    """Its callbacks call further collectives and wait for them."""
    model = DistributedDataParallel(used(), bucket_cap_mb=bucket_cap_mb)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(model, steps=5)


def join() -> Any:
    model = DistributedDataParallel(used())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            model(rows(step)).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of some rows."""
        found: torch.Tensor = self.table((x[:, 0].abs() * 5).long() % 20)
        return found


def sparse_gradients() -> Any:
    model = DistributedDataParallel(made(Words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def buffers() -> Any:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    torch.manual_seed(dist.get_rank())
    return trained(DistributedDataParallel(model))[3:] + [
        b.clone() for b in model.buffers()
    ]


def zero_1() -> Any:
    model = DistributedDataParallel(used())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


DATA_PARALLEL = [
    *(plain, small_buckets, static_graph, unused_parameters, no_sync),
    *(allreduce_hook, power_sgd, join, sparse_gradients, buffers, zero_1),
]
ROUNDED = [compressing_hook, built_in_hooks]
"""Gradients are sums of float16, which gloo rounds after each rank's."""


def nested() -> list[str]:
    """Several buckets' callbacks with collectives in them: on gloo this hangs."""
    with job():
        got = power_sgd(bucket_cap_mb=0.0001)
        totals = torch.stack([each.double().sum() for each in got[5:]])
        others = [torch.zeros_like(totals) for _ in range(dist.get_world_size())]
        dist.all_gather(others, totals)
        right = all(torch.equal(other, totals) for other in others)
        return [] if right and bool(torch.isfinite(totals).all()) else ["nested"]


def run_data_parallel() -> list[str]:
    return differences(DATA_PARALLEL) + differences(ROUNDED, 3e-4) + nested()


@pytest.mark.parametrize("progress", ["off", "on"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.full(sample=1)
def test_data_parallel(torchrun: Any, ranks: int, progress: str) -> None:
    """With a progress thread DDP's futures are completed by another thread, too."""
    env = {"COMMRT_PROGRESS": progress}
    got = torchrun(ranks, run_data_parallel, env=env, deadline_s=LONG_S)
    assert got == [[]] * ranks


# -- sharded -------------------------------------------------------------------------


def whole(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        value: Any = parameter.detach()
        found.append(value.full_tensor() if isinstance(value, DTensor) else value)
    return found


def sharded_steps(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(rows(step)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *whole(model)]


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 5))


def fsdp2(**options: Any) -> nn.Module:
    model = layers()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fully_sharded() -> Any:
    return sharded_steps(fsdp2())


def half_precision() -> Any:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    return sharded_steps(fsdp2(mp_policy=policy))


def hybrid() -> Any:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return sharded_steps(fsdp2(mesh=mesh))


def state_dicts() -> Any:
    """Write a sharded model to files and read it into another."""
    model = fsdp2()
    sharded_steps(model, 1)
    box: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    dcp.save(dcp_state.get_model_state_dict(model), checkpoint_id=box[0])
    other = fsdp2()
    state = dcp_state.get_model_state_dict(other)
    dcp.load(state, checkpoint_id=box[0])
    dcp_state.set_model_state_dict(other, state)
    assert all(
        torch.equal(a, b) for a, b in zip(whole(model), whole(other), strict=True)
    )
    return whole(other)


def dtensors() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    a, b = torch.randn(6, 5), torch.randn(5, 7)
    left = distribute_tensor(a, mesh, [Shard(0)])
    right = distribute_tensor(b, mesh, [Shard(1)])
    product = left @ right.redistribute(mesh, [Replicate()])
    columns = product.redistribute(mesh, [Shard(1)])
    return [product.full_tensor(), columns.to_local(), columns.sum().full_tensor()]


def tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(used(), mesh, plan)
    torch.manual_seed(11)
    x = torch.randn(6, 8)
    loss = model(x).square().mean()
    loss.backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return [loss.detach(), *grads]


SHARDED = [
    fully_sharded,
    half_precision,
    hybrid,
    state_dicts,
    dtensors,
    tensor_parallel,
]


def run_sharded() -> list[str]:
    return differences(SHARDED, 2e-3)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.full(sample=1)
def test_sharded_models(torchrun: Any, ranks: int) -> None:
    got = torchrun(ranks, run_sharded, deadline_s=LONG_S)
    assert got == [[]] * ranks


def run_shared_memory() -> list[Any]:
    """FSDP2 communicates from the group's memory, and divides as gloo cannot."""
    found: list[Any] = []
    with job():
        want = sharded_steps(fsdp2())
        model = fsdp2()
        for layer in (model[0], model[2], model):
            layer.set_allocate_memory_from_process_group_for_comm(True)
        got = sharded_steps(model)
        found.append(all(torch.allclose(a, b) for a, b in zip(want, got, strict=True)))
        group: Any = dist.group.WORLD
        found.append(core_of(group.communicator).has_heap)
        divided = fsdp2()
        divided.set_gradient_divide_factor(4.0)
        divided(rows(0)).sum().backward()
        plain_ = fsdp2()
        plain_(rows(0)).sum().backward()
        pairs = zip(divided.parameters(), plain_.parameters(), strict=True)
        found.append(all(p.grad is not None and q.grad is not None for p, q in pairs))
        backend = group._get_backend(torch.device("cpu"))
        kept = [
            backend.allocate_tensor(n, dtype=torch.float32, device=torch.device("cpu"))
            for n in (0, 3, 5000)
        ]
        at = kept[2].data_ptr()
        assert kept[1].data_ptr() != at
        view = kept[2][:10].view(2, 5)
        kept.pop()
        again = backend.allocate_tensor(
            5000, dtype=torch.float32, device=torch.device("cpu")
        )
        found.append(again.data_ptr() != at)  # a view of it is still there
        del view, again
        last = backend.allocate_tensor(
            5000, dtype=torch.int64, device=torch.device("cpu")
        )
        found.append(bool(last.numel() == 5000))
    return found


def test_memory_from_the_group(torchrun: Any) -> None:
    got = torchrun(RANKS, run_shared_memory, deadline_s=DEADLINE_S)
    assert got == [[True] * 5] * RANKS


# -- pipelines, compiled -------------------------------------------------------------


def piped(schedule: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    inside = [nn.Linear(16, 16) for _ in range(size - 2)]
    all_layers = [nn.Linear(8, 16), *inside, nn.Linear(16, 4)]
    stage = PipelineStage(all_layers[rank], rank, size, torch.device("cpu"))
    runner = schedule(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
    torch.manual_seed(22)
    x, target = torch.randn(16, 8), torch.randn(16, 4)
    losses: list[torch.Tensor] = []
    if rank == 0:
        runner.step(x)
    elif rank < size - 1:
        runner.step()
    else:
        runner.step(target=target, losses=losses)
    grads = [p.grad for p in all_layers[rank].parameters()]
    return [*(loss.detach() for loss in losses), *grads]


def gpipe() -> Any:
    return piped(ScheduleGPipe)


def one_forward_one_backward() -> Any:
    return piped(Schedule1F1B)


def compiled() -> Any:
    group = dist.group.WORLD

    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        dist.all_reduce(y)
        return y + 1

    model = torch.compile(DistributedDataParallel(used()), backend="eager")
    loss = model(rows(0)).square().mean()
    loss.backward()
    return [step(torch.arange(3.0)), *(p.grad for p in model.parameters())]


OTHERS = [gpipe, one_forward_one_backward, compiled]


def run_others() -> list[str]:
    return differences(OTHERS)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.full(sample=1)
def test_pipelines_and_compiled_programs(torchrun: Any, ranks: int) -> None:
    got = torchrun(ranks, run_others, deadline_s=LONG_S)
    assert got == [[]] * ranks


def run_mismatch() -> list[str]:
    """In check mode both ranks raise the same error, also where DDP is in between."""
    said = []
    with job() as rank:
        x = torch.ones(3 + rank)
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(x)
        said.append(str(raised.value))
    return said


def test_mismatches_in_check_mode(torchrun: Any) -> None:
    env = {"COMMRT_DEBUG": "check"}
    first, second = torchrun(RANKS, run_mismatch, env=env, deadline_s=DEADLINE_S)
    assert first == second
    assert "all_reduce(tensor=float32[3]" in first[0]


def run_lost_peer() -> str:
    """Rank 1 leaves out a backward pass: DDP's reducer, in C++, gets an error."""
    said = ""
    with job(timeout=timedelta(seconds=5)) as rank:
        model = DistributedDataParallel(used())
        model(rows(0)).sum().backward()
        dist.barrier()
        if rank == 0:
            with pytest.raises(RuntimeError) as raised:
                model(rows(1)).sum().backward()
            said = str(raised.value)
        dist.distributed_c10d._get_default_store().set(f"ended{rank}", "1")
        dist.distributed_c10d._get_default_store().get("ended0")
        # What is in flight will not end.
        print(json.dumps(said), flush=True)
        os._exit(0)
    return said


@pytest.mark.parametrize("progress", ["off", "on"])
def test_errors_come_through_the_reducer(torchrun: Any, progress: str) -> None:
    env = {"COMMRT_PROGRESS": progress}
    done = torchrun.failing(RANKS, run_lost_peer, env=env, deadline_s=DEADLINE_S)
    assert done.ok, done.describe_failure()
    assert "rank 1 on this node has not started it" in done.stdout
