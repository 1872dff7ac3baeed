# SPDX-License-Identifier: Apache-2.0
"""Networks that are cut over ranks: beside FSDP2, under autocast, with checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cnn_networks import meshnet
from dist_tensor_cases import off_by
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch_ranks import TorchRun

import commrt
import commrt.torch
from commrt.errors import UsageError
from commrt.layers.cnn import (
    ParallelStrategy,
    TrainingState,
    clip_grad_norm_,
    parallelize_cnn,
    state_dict,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

NEAR = 1e-11
SHAPE = (4, 3, 13, 8)
STRATEGIES = {
    "space": ParallelStrategy(sample="data", height="a"),
    "channels": ParallelStrategy(sample="data", channel="a", filter="a"),
}


def network() -> nn.Module:
    """Return a small classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


def steps(model: Any, cut: bool, batches: list[Any]) -> list[float]:
    """Train a few steps; return losses and norms of gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for x in batches:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        if cut:
            norm = clip_grad_norm_(model, 0.3)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found


def beside_fsdp(name: str, cut: bool) -> list[Any]:
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    torch.manual_seed(0)
    serial = network().double()
    batches = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(3)]
    model = copy.deepcopy(serial)
    right = steps(serial, False, batches)
    grid = ProcessGrid(comm, {"data": 2, "a": 2})
    parallelize_cnn(*(model, grid, STRATEGIES[name]), outputs="whole", cut_weights=cut)
    mesh = grid.device_mesh()["data"]
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    assert steps(model, cut, batches) == pytest.approx(right, rel=1e-6)
    own = sum(each.to_local().numel() for each in model.parameters())
    whole = sum(each.numel() for each in serial.parameters())
    assert own < whole * (0.4 if cut else 0.7)
    found = state_dict(model)
    assert found is not None
    for path, each in serial.state_dict().items():
        torch.testing.assert_close(found[path], each, rtol=1e-6, atol=1e-9)
    with pytest.raises(UsageError, match=r"0\.weight is cut by FSDP2, too: save"):
        TrainingState(model)
    return [comm.rank]


@pytest.mark.parametrize(("name", "cut"), [("space", False), ("channels", True)])
def test_fsdp2_shards_a_cut_network_over_samples(
    name: str, cut: bool, torchrun: TorchRun
) -> None:
    found = torchrun(4, beside_fsdp, name=name, cut=cut)
    assert found == [[rank] for rank in range(4)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_autocast_of_a_cut_network_is_that_of_one_process(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    serial = network()
    untouched = copy.deepcopy(serial)
    x = torch.randn(SHAPE)

    def loss_of(model: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            assert y.dtype == torch.bfloat16
        loss = y.float().square().sum()
        loss.backward()
        return loss.detach()

    right = loss_of(serial)

    def main(comm: Any) -> None:
        model = copy.deepcopy(untouched)
        with ProcessGrid(comm, {"data": 1, "a": 2}) as grid:
            parallelize_cnn(model, grid, STRATEGIES[name], outputs="whole")
            torch.testing.assert_close(loss_of(model), right, rtol=0.05, atol=0.05)
            # A bias before a batch normalization has no gradient but rounding.
            scale = max(float(each.grad.abs().max()) for each in serial.parameters())
            pairs = zip(model.parameters(), serial.parameters(), strict=True)
            for got, expected in pairs:
                assert got.grad.dtype == torch.float32
                torch.testing.assert_close(
                    got.grad, expected.grad, rtol=0.1, atol=0.03 * scale
                )

    run(2, main)


class Checkpointed(nn.Module):
    """A module whose activations are computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        """Return what the module returns."""
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("role", ["depth", "channels"])
def test_checkpointed_parts_have_the_gradients_of_one_process(
    role: str, cut: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layers = [*meshnet(4, 3, norm=True, dropout=0.2).double()]
    stages = [nn.Sequential(*layers[at : at + 8]) for at in range(0, len(layers), 8)]
    untouched = nn.Sequential(*map(Checkpointed, stages))
    x = torch.randn(2, 1, 19, 9, 5, dtype=torch.float64)
    strategy = ParallelStrategy(
        **({"depth": "a"} if role == "depth" else {"channel": "a", "filter": "a"})
    )

    def main(comm: Any) -> Any:
        kept = []
        for again in (False, True):
            model = copy.deepcopy(untouched)
            if not again:
                model = nn.Sequential(*(each.inner for each in model))
            with ProcessGrid(comm, {"a": 2}) as grid:
                parallelize_cnn(
                    *(model, grid, strategy), outputs="whole", cut_weights=cut
                )
                comm.barrier()
                torch.manual_seed(7)  # of the masks; ranks are threads of one process
                comm.barrier()
                model(x).square().sum().backward()
                kept.append([each.grad for each in model.parameters()])
        for got, expected in zip(*kept, strict=True):
            if float(expected.abs().max()) > 1e-10:
                assert off_by(got, expected) < NEAR

    run(2, main)
