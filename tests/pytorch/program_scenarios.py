# SPDX-License-Identifier: Apache-2.0
"""Scenarios of what programs do around calls: modes, threads, gradients, optimizers.

torch's optimizers are imported where they are used: importing them warns.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.distributed.nn.functional as gradients
from message_scenarios import backend
from scenarios import numbers, scenario
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

THREADS, CALLS = 4, 25
REDUCED = 3
"""Which of the functions with a gradient below is the reduction to a root."""


# -- who calls, and in which mode ----------------------------------------------------


class Marked(torch.Tensor):
    """A tensor of a class of its own, as many libraries have one."""


@scenario()
def calls_in_every_mode(group: Any) -> Any:
    """Inference, a default device, a subclass, what has a gradient and is no leaf."""
    found = []
    with torch.inference_mode():
        x, both = numbers(group, 5), torch.empty(5 * dist.get_world_size(group))
        dist.all_reduce(x, group=group)
        dist.all_gather_into_tensor(both, x, group=group)
        found += [x.tolist(), both.tolist()]
    with torch.device("meta"):
        dist.barrier(group=group)
    marked = numbers(group, 5).as_subclass(Marked)
    dist.all_reduce(marked, group=group)
    weight = numbers(group, 5).requires_grad_()
    doubled = weight * 2
    dist.all_reduce(doubled, group=group)
    doubled.square().sum().backward()
    dist.barrier(group=group, device_ids=[0])
    return [*found, type(marked) is Marked, marked.tolist(), doubled, weight.grad]


@scenario()
def threads_with_a_group_each(group: Any) -> Any:
    """Each calls and waits as it likes; no thread waits for another one."""
    groups = [dist.new_group(backend=backend(group)) for _ in range(THREADS)]
    found: list[Any] = [None] * THREADS

    def run(number: int) -> None:
        mine = []
        for call in range(CALLS):
            x = numbers(groups[number], 1 + 700 * number) + call
            work = dist.all_reduce(x, group=groups[number], async_op=bool(call % 2))
            if work is not None:
                work.wait()
            mine.append(x.sum().item())
        found[number] = mine

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in groups:
        dist.destroy_process_group(each)
    return found


@scenario(ranks=2)
def roots_by_their_rank_in_the_group(group: Any) -> Any:
    """``group_src`` and ``group_dst``, where ranks of the group are others'."""
    size = dist.get_world_size(group)
    small = dist.new_group([*range(1, size)], backend=backend(group))
    last = size - 2
    if dist.get_rank(group) == 0:
        return []
    me, count = dist.get_rank(small), size - 1
    sent, summed, mine = (numbers(group, 3) for _ in range(3))
    dist.broadcast(sent, group_src=last, group=small)
    dist.reduce(summed, group_dst=last, group=small)
    parts = [numbers(group, 3) + r for r in range(count)] if me == last else None
    dist.scatter(mine, parts, group_src=last, group=small)
    outs = [torch.empty(3) for _ in range(count)] if me == last else None
    dist.gather(mine, outs, group_dst=last, group=small)
    said = [{"from": me}]
    dist.broadcast_object_list(said, group_src=last, group=small)
    got = torch.zeros(3)
    if count > 1:
        if me == 0:
            dist.send(mine, group_dst=last, group=small)
        elif me == last:
            dist.recv(got, group_src=0, group=small)
    return [sent, summed if me == last else None, mine, outs, said, got]


@scenario(ranks=2)
def a_batch_whose_messages_have_tags(group: Any) -> Any:
    """Sent in the reverse order of what waits for them."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    after, before = (rank + 1) % size, (rank - 1) % size
    into = [torch.empty(3) for _ in range(4)]
    receives = [
        dist.P2POp(dist.irecv, x, group=group, tag=tag, group_peer=before)
        for tag, x in enumerate(into)
    ]
    sends = [
        dist.P2POp(
            dist.isend, numbers(group, 3) + tag, group=group, tag=tag, group_peer=after
        )
        for tag in reversed(range(4))
    ]
    for work in dist.batch_isend_irecv([*receives, *sends]):
        work.wait()
    return into


# -- gradients through collectives ---------------------------------------------------


@scenario()
def gradients_of_torchs_own_functions(group: Any) -> Any:
    """Those of ``torch.distributed.nn``: each sums what all ranks have made of it."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    root = dist.get_global_rank(group, size - 1)
    weights = numbers(group, 3) / 4

    def given() -> torch.Tensor:
        return numbers(group, 3).requires_grad_()

    def several() -> list[torch.Tensor]:
        return [(numbers(group, 3) + r).requires_grad_() for r in range(size)]

    found: list[Any] = []
    for function in (
        lambda x: [gradients.all_reduce(x, group=group)],
        lambda x: [gradients.broadcast(x, root, group=group)],
        lambda x: gradients.all_gather(x, group=group),
        lambda x: [gradients.reduce(x, root, group=group)],
        lambda x: gradients.gather(x, root, group=group),
        lambda x: gradients.all_to_all([torch.empty(3)] * size, [x] * size, group),
    ):
        x = given()
        outs = function(x)
        sum((out * weights).sum() for out in outs).backward()
        # What others than the root get of a reduction is theirs to overwrite.
        mine = rank == size - 1 or len(found) != REDUCED
        found.append([[out.detach() for out in outs] if mine else [], x.grad])
    for combine in (
        lambda xs: gradients.reduce_scatter(torch.empty(3), xs, group=group),
        lambda xs: gradients.scatter(xs, root, group=group),
        lambda xs: gradients.all_to_all_single(
            torch.empty(3 * size), torch.cat(xs), group=group
        ),
    ):
        xs = several()
        out = combine(xs)
        (out * weights.repeat(out.numel() // 3)).sum().backward()
        found.append([out.detach(), [x.grad for x in xs]])
    return found


# -- what trains and saves -----------------------------------------------------------


def trained(
    group: Any, model: DistributedDataParallel, optimizer: Any, steps: int = 6
) -> list[torch.Tensor]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank(group))
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


@scenario()
def ranks_that_average_models_now_and_then(group: Any) -> Any:
    """Local SGD: gradients within a subgroup, and parameters every other step."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(net(), process_group=group)
    alone = [
        dist.new_group([rank], backend=backend(group))
        for rank in dist.get_process_group_ranks(group)
    ]
    state = local_sgd.PostLocalSGDState(
        process_group=group,
        subgroup=alone[dist.get_rank(group)],
        start_localSGD_iter=2,
    )
    model.register_comm_hook(state, local_sgd.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        PeriodicModelAverager(period=2, warmup_steps=2, process_group=group),
    )
    return trained(group, model, optimizer)


@scenario(gloo_cannot="torch does not let it, as it may hang there")
def an_optimizer_that_steps_in_the_hook(group: Any) -> Any:
    """ZeRO-1 whose owners of parameters step, and broadcast, while DDP goes on.

    It begins when DDP has cut its buckets anew: torch says so, and skips these steps.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain = DistributedDataParallel(net(), process_group=group)
    late = Late(plain.parameters())
    want = trained(group, plain, late)
    model = DistributedDataParallel(net(), process_group=group, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        process_group=group,
        overlap_with_ddp=True,
        lr=0.1,
    )
    hook = ddp_zero_hook.hook_with_zero_step(allreduce_hook, model, optimizer)
    model.register_comm_hook(group, hook)
    return [*zip(trained(group, model, optimizer), want, strict=True)]


class Late(torch.optim.SGD):
    """What the optimizer above does, without the steps that it skips."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.skipped = 3

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step, but for the first ones."""
        self.skipped -= 1
        return None if self.skipped >= 0 else super().step(closure)


@scenario()
def a_checkpoint_that_is_written_meanwhile(group: Any) -> Any:
    """A thread of torch's plans and commits it by collectives of the group."""
    rank = dist.get_rank(group)
    names = [tempfile.mkdtemp(prefix="checkpoint-") if rank == 0 else ""]
    dist.broadcast_object_list(names, group_src=0, group=group)
    state = {"own": {f"of {rank}": numbers(group, 5)}, "common": torch.arange(4.0)}
    saved = checkpoints.async_save(
        state, checkpoint_id=names[0], process_group=group, no_dist=False
    )
    saved.result()
    got = {"own": {f"of {rank}": torch.zeros(5)}, "common": torch.zeros(4)}
    checkpoints.load(got, checkpoint_id=names[0], process_group=group)
    files = sorted(path.suffix for path in Path(names[0]).iterdir())
    dist.barrier(group=group)
    if rank == 0:
        shutil.rmtree(names[0])
    return [got["own"][f"of {rank}"], got["common"], files]
