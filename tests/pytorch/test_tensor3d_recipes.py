# SPDX-License-Identifier: Apache-2.0
"""Layers on grids beside FSDP2, under autocast, and with torch's checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_gpt import SmallGpt, lines, trained
from tensor3d_cases import drawn_in, filled
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch_ranks import TorchRun

import commrt
import commrt.torch
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import (
    Embedding3d,
    Linear3d,
    clip_grad_norm_,
    overlap_communication,
    parallelize,
    state_dict,
    sync_gradients,
)
from commrt.local import run

STEPS, BATCH, MOST = 3, 8, 0.5


def with_fsdp(axes: dict[str, int], average: bool) -> list[Any]:
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    grid = ProcessGrid(comm, axes)
    serial = filled(SmallGpt(), 3)
    model: Any = parallelize(copy.deepcopy(serial), grid, pairs={"*.up": "*.down"})
    mesh = grid.device_mesh()["data"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(UsageError, match="pass reduce_scatter=False"):
        overlap_communication(model)
    overlap_communication(model, reduce_scatter=False)
    replicas = axes["data"] * axes.get("z", 1)
    own = grid.coords["data"] * axes.get("z", 1) + grid.coords.get("z", 0)

    def rates(scale: float) -> float:
        return 0.1 / scale

    def run_on(net: Any, batches: list[Any], scale: float, is_mine: bool) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), lr=rates(scale))
        norms = []

        def after(loss: Any) -> float:
            if is_mine:
                sync_gradients(net, average=average)
                norms.append(float(clip_grad_norm_(net, MOST * scale)))
                comm.allreduce(loss, op="avg")
            else:
                parameters = net.parameters()
                norms.append(float(nn.utils.clip_grad_norm_(parameters, MOST)))
            return float(loss)

        return trained(net, optimizer, batches, after), norms

    whole = [lines(step, BATCH) for step in range(STEPS)]
    right = run_on(serial, whole, 1.0, False)
    scale = 1.0 if average else float(replicas)
    batches = [each.chunk(replicas)[own] for each in whole]
    losses, norms = run_on(model, batches, scale, True)
    # torch adds 1e-6 to a norm before it divides by it, which scales with no loss.
    assert losses == pytest.approx(right[0], rel=1e-9 if average else 1e-5)
    assert [each / scale for each in norms] == pytest.approx(right[1], rel=1e-6)
    state = state_dict(model)
    assert state is not None
    for name, each in serial.state_dict().items():
        torch.testing.assert_close(state[name], each, rtol=1e-4, atol=1e-6)
    return [comm.rank]


@pytest.mark.full(sample=1)
@pytest.mark.parametrize(
    ("axes", "average"),
    [({"data": 2, "z": 2}, True), ({"data": 2, "x": 2}, False)],
)
def test_fsdp2_shards_over_data_beside_the_grid(
    axes: dict[str, int], average: bool, torchrun: TorchRun
) -> None:
    found = torchrun(4, with_fsdp, axes=axes, average=average)
    assert found == [[rank] for rank in range(4)]


class Pair(nn.Module):
    """Two layers that keep what lies between them cut."""

    def __init__(self, grid: ProcessGrid) -> None:
        super().__init__()
        self.up = Linear3d(16, 32, grid=grid, whole_output=False)
        self.down = Linear3d(32, 16, grid=grid, transpose=True, whole_input=False)

    def forward(self, x: Any) -> Any:
        """Return the pair's output."""
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("on", [False, True])
def test_autocast_computes_and_sends_in_bfloat16(on: bool, seed: int) -> None:
    serial = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    serial = filled(serial, seed).float()
    x = drawn_in(seed, 6, 16).float()

    def loss_of(model: nn.Module, given: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(given)
            assert y.dtype == torch.bfloat16
        loss = y.float().square().sum()
        loss.backward()
        return loss

    one = x.clone().requires_grad_()
    right = loss_of(serial, one)

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"z": 2, "x": 2}) as grid:
            pair = Pair(grid)
            names = {"up": "0", "down": "2"}
            state = serial.state_dict()
            for layer, number in names.items():
                for each in ("weight", "bias"):
                    part = state[f"{number}.{each}"]
                    getattr(pair, layer).load_state_dict({each: part}, strict=False)
            if on:
                overlap_communication(pair)
            own = x.chunk(2)[grid.coords["z"]].clone().requires_grad_()
            comm.barrier()
            with commrt.trace.record() as recording:
                loss = loss_of(pair, own)
                comm.barrier()
            grid["z"].allreduce(total := loss.detach().clone())
            torch.testing.assert_close(total, right.detach(), rtol=0.02, atol=0.02)
            expected = one.grad.chunk(2)[grid.coords["z"]]
            assert own.grad.dtype == torch.float32
            torch.testing.assert_close(own.grad, expected, rtol=0.1, atol=0.3)
            for layer, number in names.items():
                weight = getattr(pair, layer).weight
                assert weight.dtype == weight.grad.dtype == torch.float32
                whole = getattr(pair, layer).cuts["weight"].whole(weight.grad)
                serial_gradient = serial[int(number)].weight.grad
                off = float((whole - serial_gradient).norm() / serial_gradient.norm())
                assert off < 0.03
            (log,) = (each for each in recording.logs() if each.rank == comm.rank)
            return {dtype for (dtype,), v in log.volume(("dtype",)).items() if v.nbytes}

    assert run(4, main) == [{"bfloat16"}] * 4


def test_float64_is_left_alone_by_autocast(seed: int) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2}) as grid:
            layer = Linear3d(4, 6, grid=grid, dtype=torch.float64)
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(drawn_in(seed, 3, 4)).dtype == torch.float64

    run(2, main)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_both_kinds_of_checkpoints_have_the_same_gradients(
    use_reentrant: bool, on: bool, seed: int
) -> None:
    def main(comm: Any) -> list[Any]:
        found = []
        with ProcessGrid(comm, {"z": 2, "x": 2}) as grid:
            pair = Pair(grid)
            for again in (False, True):
                overlap_communication(pair, on, on, on)
                x = drawn_in(seed, 5, 16).float().requires_grad_()
                y = checkpoint(pair, x, use_reentrant=use_reentrant) if again else None
                (pair(x) if y is None else y).sum().backward()
                found.append([x.grad, *(each.grad for each in pair.parameters())])
                for each in pair.parameters():
                    each.grad = None
        return found

    for plain, computed_again in run(4, main):
        for one, other in zip(plain, computed_again, strict=True):
            assert torch.equal(one, other)


def test_a_layer_without_gradients_sends_nothing_backward(seed: int) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"z": 2, "x": 2}) as grid:
            table = Embedding3d(6, 4, grid=grid)
            frozen = Linear3d(4, 4, grid=grid).requires_grad_(False)
            y = frozen(table(torch.tensor([1, 2])))
            y.sum().backward()
            assert frozen.weight.grad is None
            assert table.weight.grad is not None
            with torch.no_grad():
                assert not frozen(table(torch.tensor([1]))).requires_grad

    run(4, main)
