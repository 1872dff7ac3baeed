# SPDX-License-Identifier: Apache-2.0
"""DDP with commrt's hook gives what one process gives, in every way of sending."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from commrt.comm import core_of
from commrt.errors import UsageError
from commrt.layers.data import GradientReducer
from commrt.layers.data.ddp import HookState, reduce_bucket

DEADLINE_S = 300.0


def made() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(40, 3))


def rows(step: int, rank: int, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 6, generator=generator)


def losses_alone(size: int, steps: int) -> list[float]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.cat([rows(step, r) for r in range(size)])).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def losses(model: nn.Module, rank: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(rows(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        found.append(float(mean))
    return found


def worst(found: list[float], expected: list[float]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def ways_of_sending(**_: Any) -> list[str]:
    """Return what is wrong; empty where nothing is."""
    wrong = []
    ways: list[tuple[dict[str, Any], float]] = [
        ({}, 1e-5),
        ({"compress": "bfloat16"}, 0.02),
        ({"compress": "float16"}, 0.01),
        ({"compress": "int8", "error_feedback": False}, 0.05),
        ({"compress": "int8"}, 0.05),
        ({"density": 0.5}, 0.5),
        ({"density": 1.0}, 1e-5),
    ]
    with job() as rank:
        size = dist.get_world_size()
        expected = losses_alone(size, 8)
        for options, tolerance in ways:
            state = HookState(**options)
            model = DistributedDataParallel(made(), bucket_cap_mb=0.004)
            model.register_comm_hook(state, reduce_bucket)
            off = worst(losses(model, rank, 8), expected)
            if not off <= tolerance:
                wrong.append(f"{options}: off by {off}")
            bits = torch.cat([p.detach().flatten() for p in model.parameters()])
            both = [torch.empty_like(bits) for _ in range(size)]
            dist.all_gather(both, bits)
            if not all(torch.equal(bits, other) for other in both):
                wrong.append(f"{options}: the ranks' parameters differ")
            state.close()
        wrong += _others(rank, size)
    return wrong


def _others(rank: int, size: int) -> list[str]:
    """Accumulation, an embedding, parameters without gradients, the array form."""
    wrong = []
    state = HookState()
    if not 2**-4 <= state.bucket_cap_mb <= 32:
        wrong.append(f"bucket_cap_mb: {state.bucket_cap_mb}")
    model = DistributedDataParallel(made())
    model.register_comm_hook(state, reduce_bucket)
    with model.no_sync():
        model(rows(0, rank)).sum().backward()
    model(rows(1, rank)).sum().backward()
    alone = made()
    for each in range(size):
        for step in (0, 1):
            (alone(rows(step, each)).sum() / size).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    if not all(torch.allclose(a.grad, b.grad, atol=1e-5) for a, b in pairs):
        wrong.append("no_sync")
    state.close()

    table = nn.Embedding(20, 3, sparse=True)
    nn.init.ones_(table.weight)
    state = HookState()
    model = DistributedDataParallel(table)
    model.register_comm_hook(state, reduce_bucket)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([rank, rank, 7])).sum().backward()
        expected = torch.zeros(20, 3)
        expected[:size] = 2 / size
        expected[7] += 1
        if not torch.equal(table.weight.grad.to_dense(), expected):
            wrong.append(f"an embedding: {table.weight.grad}")
    state.close()

    layers = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            found: torch.Tensor = self.layers[which](x)
            return found

    state = HookState()
    model = DistributedDataParallel(Either(), find_unused_parameters=True)
    model.register_comm_hook(state, reduce_bucket)
    model(torch.ones(1, 6), 0 if rank == 0 else 1).sum().backward()
    shares = [1 / size, (size - 1) / size]
    for share, layer in zip(shares, layers, strict=True):
        if not torch.allclose(layer.weight.grad, torch.full((2, 6), share)):
            wrong.append(f"unused: {layer.weight.grad}")
    state.close()
    return wrong + _ends_of_backward(rank, size) + _arrays(rank, size)


class Checkpointed(nn.Module):
    """Two layers, each computed anew in a backward pass within the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, plain: bool = False) -> torch.Tensor:
        """Return six numbers for each row."""
        for layer in (self.first, self.second):
            x = layer(x) if plain else checkpoint(layer, x, use_reentrant=True)
        return x


def _ends_of_backward(rank: int, size: int) -> list[str]:
    """With the hook and without: where DDP waits elsewhere than at the usual end."""
    wrong = []
    alone = Checkpointed()
    for each in range(size):
        (alone(rows(0, each), plain=True).sum() / size).backward()
    for hooked in (False, True):
        for options in ({"static_graph": True}, {"static_graph": False}):
            state = HookState()
            plain = not options["static_graph"]
            model = DistributedDataParallel(
                Checkpointed(), bucket_cap_mb=1e-5, **options
            )
            if hooked:
                model.register_comm_hook(state, reduce_bucket)
            for _ in range(3):
                model.zero_grad()
                x = rows(0, rank).requires_grad_()
                model(x, plain=plain).sum().backward()
                pairs = zip(model.parameters(), alone.parameters(), strict=True)
                if not all(torch.allclose(a.grad, b.grad, atol=1e-5) for a, b in pairs):
                    wrong.append(f"{options}, hook: {hooked}")
            state.close()
    return wrong


def _arrays(rank: int, size: int) -> list[str]:
    """The plain form on tensors: contiguous, turned, bfloat16, none."""
    wrong = []
    comm = dist.group.WORLD.communicator
    like = [torch.zeros(3, 4), torch.zeros(4, 3), torch.zeros(5, dtype=torch.bfloat16)]
    with GradientReducer(comm, like, bucket_nbytes=50) as reducer:
        for step in range(2):
            turned = torch.full((3, 4), rank + 2.0).t()
            given = [torch.full((3, 4), rank + 1.0), turned, None]
            if step == 1 and rank == 0:
                given[2] = torch.full((5,), 4.0, dtype=torch.bfloat16)
            means = reducer(given)
            mean = (size - 1) / 2
            same = means[0] is given[0] and means[1] is turned
            if not (same and (means[0] == mean + 1).all()):
                wrong.append(f"arrays: {means[0]}")
            if not (turned == mean + 2).all():
                wrong.append(f"turned: {turned}")
            if (means[2] is None) != (step == 0):
                wrong.append(f"none: {means[2]}")
        if not (means[2] == 4 / size).all() or means[2].dtype != torch.bfloat16:
            wrong.append(f"bfloat16: {means[2]}")
    return wrong


@pytest.mark.parametrize("nranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "progress", ["off", pytest.param("on", marks=pytest.mark.full)]
)
def test_ddp_with_the_hook(torchrun: Any, nranks: int, progress: str) -> None:
    results = torchrun(
        nranks,
        ways_of_sending,
        env={"COMMRT_PROGRESS": progress},
        deadline_s=DEADLINE_S,
    )
    assert results == [[]] * nranks


def failing(**_: Any) -> str:
    """Return what DDP raises where a rank has given up."""
    with job() as rank:
        state = HookState()
        model = DistributedDataParallel(made())
        model.register_comm_hook(state, reduce_bucket)
        if rank == 1:
            core_of(state.comm).give_up("rank 1 has other plans")
            return "gave up"
        try:
            model(rows(0, rank)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_an_error_comes_out_of_the_backward_pass(torchrun: Any) -> None:
    results = torchrun(2, failing, deadline_s=DEADLINE_S)
    assert "rank 1 gave up" in results[0]


def test_wrong_arguments_of_the_hook() -> None:
    with pytest.raises(UsageError, match="no process group of commrt"):
        HookState(object())
