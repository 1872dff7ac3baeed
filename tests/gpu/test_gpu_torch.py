# SPDX-License-Identifier: Apache-2.0
"""torch's process groups with CUDA tensors: scenarios, streams, DDP, FSDP2, graphs.

Each test is one launch of torchrun. Two ranks share the GPU, so their calls go by
memory of peers; a rank alone has NCCL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 300.0
PYTORCH = Path(__file__).parents[1] / "pytorch"
LIMIT = timedelta(seconds=DEADLINE_S)


def started(backend: str, **options: Any) -> Any:
    """Start the default group; return torch.distributed."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", message=".*were tested with torch")
    torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=LIMIT, **options)
    return dist


# -- scenarios -----------------------------------------------------------------------


def scenarios_on_a_gpu() -> dict[str, Any]:
    """Run all scenarios of process groups with CUDA as the default device.

    The reference is what they give on the CPU, where tests/pytorch holds them to gloo.
    What this torch has not fails there already, and is left out.
    """
    sys.path.insert(0, str(PYTORCH))
    import collective_scenarios
    import message_scenarios
    import nccl_scenarios
    import scenarios
    import torch
    from process_groups import unequal

    del collective_scenarios, message_scenarios, nccl_scenarios
    dist = started("commrt")
    host = dist.new_group(backend="commrt")
    wrong, left_out, good = [], [], []
    every = scenarios.BESIDE_GLOO | scenarios.WITHOUT_GLOO
    for name in scenarios.names(dist.get_world_size()):
        results: list[Any] = []
        found: list[str] = []
        for device, group in (("cpu", host), ("cuda", dist.group.WORLD)):
            torch.manual_seed(1234)
            forget_keys(dist, host)
            try:
                with torch.device(device):
                    results.append(on_cpu(every[name](group)))
            except Exception as error:  # noqa: BLE001  names the scenario
                text = f"{name}: {type(error).__name__}: {str(error)[:400]}"
                (found if results else left_out).append(text)
                break
        if len(results) == 2:
            if name in scenarios.WITHOUT_GLOO:
                results = [[pair[k] for pair in results[1]] for k in (1, 0)]
            found = unequal(*results, scenarios.TOLERANCE, name)
        wrong += found
        if len(results) == 2 and not found:
            good.append(name)
    dist.destroy_process_group()
    return {"wrong": wrong, "left_out": left_out, "good": good}


def forget_keys(dist: Any, group: Any) -> None:
    """Delete what scenarios leave in the store, which they name by the backend."""
    store = dist.PrefixStore("commrt", dist.distributed_c10d._get_default_store())
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        for key in ("late", "waited"):
            store.delete_key(key)
    dist.barrier(group=group)


def on_cpu(found: Any) -> Any:
    """Return nested results with every tensor on the CPU."""
    import torch

    if isinstance(found, torch.Tensor):
        return found.detach().cpu()
    if isinstance(found, dict):
        return {key: on_cpu(each) for key, each in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(on_cpu, found))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_scenarios(size: int, torch_ranks: Any) -> None:
    found = torch_ranks(size, scenarios_on_a_gpu, deadline_s=DEADLINE_S)
    assert [line for each in found for line in each["wrong"]] == []
    assert all(len(each["good"]) > 50 for each in found), found


# -- streams -------------------------------------------------------------------------


def streams() -> list[str]:
    """Let calls follow and precede work of several streams that take their time."""
    import torch

    dist = started("commrt")
    size, rank = dist.get_world_size(), dist.get_rank()
    total = size * (size + 1) / 2
    wrong = []

    def check(what: str, got: Any, want: float) -> None:
        if not bool((got == want).all()):
            wrong.append(f"{what}: {got.flatten()[:3].tolist()}, not {want}")

    for count in (1, 1000, 3_000_001):
        x = torch.zeros(count, device="cuda")
        torch.cuda.synchronize()
        for turn in range(8):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                x.fill_(rank + 1.0 + turn)  # late: the call has to wait for it
                work = dist.all_reduce(x, async_op=True)
                other = torch.ones(1000, device="cuda") * 3
                work.wait()
                y = x * 2  # the call has ended before
            torch.cuda.current_stream().wait_stream(side)
            check(f"{count} in a stream", y, 2 * (total + size * turn))
            check("beside", other, 3.0)
            x.fill_(rank + 1.0)
            dist.all_reduce(x)
            x.mul_(2)
            check(f"{count} in the current stream", x, 2 * total)
    # wait() in a stream other than the call's
    x = torch.full((1 << 20,), rank + 1.0, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work.wait()
        y = x.clone()
    side.synchronize()
    check("waited for in another stream", y, total)
    # a future's callback, and many that are waited for in another order
    many = [torch.full((4097,), rank + i + 1.0, device="cuda") for i in range(32)]
    works = [dist.all_reduce(each, async_op=True) for each in many]
    for work in reversed(works):
        work.wait()
    for i, each in enumerate(many):
        check(f"number {i}", each, total + size * i)
    x = torch.full((100,), rank + 1.0, device="cuda")
    future = dist.all_reduce(x, async_op=True).get_future()
    found = future.then(lambda done: done.value()[0] * 10).wait()
    check("a future", found, 10 * total)
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("size", [1, 2])
def test_streams(size: int, torch_ranks: Any) -> None:
    assert torch_ranks(size, streams, deadline_s=DEADLINE_S) == [[]] * size


# -- training ------------------------------------------------------------------------


def training() -> list[str]:
    """Train by DDP and FSDP2; compare with one process on the whole batch."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist = started("commrt")
    rank, size = dist.get_rank(), dist.get_world_size()

    def model() -> Any:
        torch.manual_seed(7)
        layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
        return torch.nn.Sequential(*layers).cuda()

    def rows(step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(6 * size, 64, generator=generator).to("cuda")

    def trained(net: Any, mine: bool) -> list[Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            batch = rows(step)
            part = batch[rank::size] if mine else batch
            net(part).square().mean().backward()
            optimizer.step()
        return [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
            for p in net.parameters()
        ]

    want = trained(model(), mine=False)
    sharded = model()
    for layer in sharded:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(sharded)
    ways: dict[str, Callable[[], list[Any]]] = {
        "DDP": lambda: trained(DistributedDataParallel(model()), mine=True),
        "DDP with small buckets": lambda: trained(
            DistributedDataParallel(
                model(), bucket_cap_mb=0.01, gradient_as_bucket_view=True
            ),
            mine=True,
        ),
        "FSDP2": lambda: trained(sharded, mine=True),
    }
    wrong = []
    for name, way in ways.items():
        got = way()
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                wrong.append(f"{name}: parameter {number}: {(a - b).abs().max()}")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("size", [1, 2])
def test_training(size: int, torch_ranks: Any) -> None:
    assert torch_ranks(size, training, deadline_s=DEADLINE_S) == [[]] * size


# -- groups of several backends ------------------------------------------------------


def backends(backend: str, bound: bool) -> list[str]:
    """Sum a tensor on either device in a group with a backend for each."""
    import torch

    options = {"device_id": torch.device("cuda:0")} if bound else {}
    dist = started(backend, **options)
    size = dist.get_world_size()
    wrong = []
    part = dist.new_group(list(range(size)))
    for group in (None, part):
        for device in ("cpu", "cuda"):
            x = torch.full((1001,), dist.get_rank() + 1.0, device=device)
            dist.all_reduce(x, group=group)
            outs = [torch.empty(3, device=device) for _ in range(size)]
            dist.all_gather(outs, x[:3].contiguous(), group=group)
            want = size * (size + 1) / 2
            for got in (x, *outs):
                if not bool((got == want).all()):
                    wrong.append(f"{device}: {got[:3].tolist()}, not {want}")
        dist.barrier(group)
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("bound", [False, True], ids=["plain", "bound"])
@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("cpu:gloo,cuda:commrt", 2),
        ("commrt", 2),
        ("cpu:commrt,cuda:nccl", 1),
        ("cpu:commrt,cuda:commrt", 1),
    ],
)
def test_backends_of_devices(
    backend: str, size: int, bound: bool, torch_ranks: Any
) -> None:
    found = torch_ranks(
        size, backends, deadline_s=DEADLINE_S, backend=backend, bound=bound
    )
    assert found == [[]] * size


# -- graphs --------------------------------------------------------------------------


def graphs() -> list[str]:
    """Capture calls by torch's graphs, and replay them."""
    import torch

    dist = started("commrt")
    wrong = []
    x, y = (torch.ones(1000, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        dist.all_reduce(x)
        dist.all_gather_into_tensor(y, x)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        dist.all_reduce(x)
        work = dist.all_gather_into_tensor(y, x, async_op=True)
        work.wait()
        y.mul_(2)
    for turn in range(5):
        graph.replay()
        dist.all_reduce(x)  # between replays
        want = 2.0 * (turn + 2)
        if not bool((y == want).all()):
            wrong.append(f"replay {turn}: {y[:3].tolist()}, not {want}")
    torch.cuda.synchronize()
    del graph
    dist.destroy_process_group()
    return wrong


def test_graphs_of_torch(torch_ranks: Any) -> None:
    assert torch_ranks(1, graphs, deadline_s=DEADLINE_S) == [[]]


# -- bad input -----------------------------------------------------------------------


def mistakes() -> list[str]:
    """Mix devices and kinds in a call: each says what is wrong, and nothing breaks."""
    import torch

    dist = started("commrt")
    size = dist.get_world_size()
    host, card = torch.ones(4), torch.ones(4, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "out on the host": lambda: dist.all_gather_into_tensor(
            torch.empty(4 * size), card
        ),
        "out on the card": lambda: dist.all_gather_into_tensor(
            torch.empty(4 * size, device="cuda"), host
        ),
        "list of both": lambda: dist.all_gather(
            [torch.empty(4, device=("cuda", "cpu")[i % 2]) for i in range(size)], card
        ),
        "sparse": lambda: dist.broadcast(torch.eye(3, device="cuda").to_sparse(), 0),
        "meta": lambda: dist.all_reduce(torch.ones(3, device="meta")),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
            wrong.append(f"{name}: nothing was raised")
        except (ValueError, RuntimeError, TypeError, NotImplementedError):
            pass
        x = torch.ones(3, device="cuda")
        dist.all_reduce(x)
        if not bool((x == size).all()):
            wrong.append(f"after {name}: {x.tolist()}")
    dist.destroy_process_group()
    return wrong


def test_mistakes_are_told(torch_ranks: Any) -> None:
    assert torch_ranks(2, mistakes, deadline_s=DEADLINE_S) == [[]] * 2


# -- many calls ----------------------------------------------------------------------


def many() -> dict[str, Any]:
    """Make calls that allocate as they go, beside torch's caching allocator."""
    import torch

    dist = started("commrt")
    size, rank = dist.get_world_size(), dist.get_rank()
    number = int(os.environ.get("COMMRT_TEST_MANY", "2000"))
    failed = torch.zeros((), device="cuda")
    for turn in range(number):
        x = torch.full((1 + turn * 37 % 5000,), rank + 1.0, device="cuda")
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        failed += (x != size * (size + 1) / 2).any()
        del x, work  # its memory is given to the next tensors at once
    wrong = int(failed)
    held = torch.cuda.memory_allocated()
    dist.destroy_process_group()
    return {"wrong": wrong, "held_kib": held >> 10}


@pytest.mark.parametrize("size", [1, 2])
def test_memory_that_torch_reuses(size: int, torch_ranks: Any) -> None:
    found = torch_ranks(size, many, deadline_s=DEADLINE_S)
    assert all(each["wrong"] == 0 and each["held_kib"] < 1024 for each in found), found
