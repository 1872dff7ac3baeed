# SPDX-License-Identifier: Apache-2.0
"""Optimizers of cut parameters in torch's distributed checkpoint: any grid goes on."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_tensor_cases import draw_placement, drawn, leaf, off_by
from tensor3d_cases import filled
from torch import nn
from torch.distributed import checkpoint
from torch_ranks import TorchRun

import commrt
import commrt.torch
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import (
    ChannelConv,
    Features,
    Form,
    Linear3d,
    TrainingState,
    state_dict,
)
from commrt.layers.tensors import DistTensor, Placement
from commrt.layers.tensors.checkpoint import OptimizerShards
from commrt.local import run

NEAR = 1e-12
GRIDS = [
    {"data": 2, "z": 2, "y": 1, "x": 1},
    {"data": 1, "z": 1, "y": 2, "x": 2},
    {"z": 4},
    {"data": 1, "z": 2, "x": 2},
]
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
}


def serial_model() -> Any:
    layers = nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 9), nn.LayerNorm(9)
    return filled(nn.Sequential(*layers, nn.Linear(9, 6)), 3)


def on_grid(serial: Any, grid: ProcessGrid) -> Any:
    """Return a model whose last weight has sections, as those of attention have."""
    model = copy.deepcopy(serial)
    model[0] = ChannelConv(model[0], grid)
    model[2] = Linear3d.from_linear(model[2], grid)
    cut = Features((2, 2, 2))
    model[4] = Linear3d.from_linear(model[4], grid, Form(outputs=cut))
    return model


def step(model: Any, optimizer: Any, serial: Any, turn: int) -> None:
    """Make a step with gradients that depend on the turn alone."""
    given = filled(copy.deepcopy(serial), turn).state_dict()
    for name, parameter in model.named_parameters():
        whole = given[name]
        cut = getattr(parameter, "grid_cut", None)
        parameter.grad = whole.clone() if cut is None else cut.cut(whole)
    optimizer.step()


def off(model: Any, serial: Any) -> float:
    whole = state_dict(model)
    assert whole is not None
    return max(off_by(whole[n], x) for n, x in serial.state_dict().items())


def trained_on(folder: str, kind: str) -> list[Any]:
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    make = OPTIMIZERS[kind]
    serial = serial_model()
    expected = copy.deepcopy(serial)
    right = make(expected.parameters())
    model, found = None, []
    for turn, axes in enumerate(GRIDS):
        grid = ProcessGrid(comm, axes)
        model = on_grid(filled(copy.deepcopy(serial), 100 + turn), grid)
        optimizer = make(model.parameters())
        if turn == 0:
            model = on_grid(serial, grid)
            optimizer = make(model.parameters())
        else:
            place = f"{folder}/{turn - 1}"
            group = optimizer.param_groups[0]
            group["lr"] = group["lr"] * 0 + 7.0  # the checkpoint's one comes back
            state = {"training": TrainingState(model, optimizer)}
            checkpoint.load(state, checkpoint_id=place)
            found.append(off(model, expected))
        for number in range(2):
            step(model, optimizer, serial, 10 * turn + number)
            step(expected, right, serial, 10 * turn + number)
        found.append(off(model, expected))
        state = {"training": TrainingState(model, optimizer)}
        checkpoint.save(state, checkpoint_id=f"{folder}/{turn}")
    dist.barrier()
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.full(sample=1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_goes_on_on_other_grids(
    kind: str, torchrun: TorchRun, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    for found in torchrun(4, trained_on, folder=folder, kind=kind):
        assert len(found) == 7
        assert max(found) < NEAR
    # One process goes on from what four have saved.
    serial = serial_model()
    expected = copy.deepcopy(serial)
    right = OPTIMIZERS[kind](expected.parameters())
    for turn in range(4):
        for number in range(2):
            step(expected, right, serial, 10 * turn + number)
    optimizer = OPTIMIZERS[kind](serial.parameters())
    state = {"training": TrainingState(serial, optimizer)}
    checkpoint.load(state, checkpoint_id=f"{folder}/3", no_dist=True)
    untouched = serial_model()
    step(serial, optimizer, untouched, 50)
    step(expected, right, untouched, 50)
    assert (
        max(
            off_by(x, y)
            for x, y in zip(serial.parameters(), expected.parameters(), strict=True)
        )
        < NEAR
    )


def dist_tensors_saved(folder: str, seed: int) -> list[Any]:
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    rng = random.Random(seed)
    shapes = {"one": (7, 5), "two": (3,), "three": (2, 1, 4)}
    wholes = {name: drawn(rng, shape) for name, shape in shapes.items()}
    one = ProcessGrid(comm, {"a": 2, "b": 2})
    other = ProcessGrid(comm, {"c": 4})

    def made(grid: ProcessGrid) -> tuple[dict[str, DistTensor], Any]:
        named = {
            name: leaf(whole, grid, draw_placement(rng, grid, whole.shape))
            for name, whole in wholes.items()
        }
        return named, torch.optim.Adam([x.local for x in named.values()])

    named, optimizer = made(one)
    for name, x in named.items():
        x.local.grad = DistTensor.from_whole(wholes[name], one, x.placement).local
    optimizer.step()
    state = {"optimizer": OptimizerShards(optimizer, named)}
    checkpoint.save(state, checkpoint_id=folder)
    again, second = made(other)
    state = {"optimizer": OptimizerShards(second, again)}
    checkpoint.load(state, checkpoint_id=folder)
    found = []
    for name, x in again.items():
        kept = second.state[x.local]
        moment = DistTensor(kept["exp_avg"], x.shape, other, x.placement).whole()
        found.append(off_by(moment, 0.1 * wholes[name]))
        assert kept["step"] == 1
    dist.barrier()
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_of_dist_tensors_load_under_other_placements(
    torchrun: TorchRun, tmp_path: Path, seed: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    for found in torchrun(4, dist_tensors_saved, folder=folder, seed=seed):
        assert len(found) == 3
        assert max(found) < NEAR


def test_optimizers_that_cannot_be_saved_are_refused() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2}) as grid:
            x = leaf(torch.ones(4, 6), grid, Placement("x", None))
            optimizer = torch.optim.Adam([x.local, torch.ones(3, requires_grad=True)])
            with pytest.raises(UsageError, match=r"of shape \(3,\) in group 0"):
                OptimizerShards(optimizer, {"weight": x})
            by_rows = torch.optim.Adafactor([x.local])
            state = OptimizerShards(by_rows, {"weight": x})
            with pytest.raises(UsageError, match="row_var of weight has the shape"):
                state.state_dict()
            one = OptimizerShards(torch.optim.Adam([x.local]), {"weight": x})
            given = one.state_dict()
            given["groups"][0]["params"] = ["other"]
            with pytest.raises(UsageError, match="groups of the parameters"):
                one.load_state_dict(given)

    run(2, main)


def test_a_state_made_by_zeros_changes_no_parameter() -> None:
    parameter = torch.ones(5, requires_grad=True)
    parameter.grad = torch.full((5,), 3.0)
    for make in OPTIMIZERS.values():
        optimizer = make([parameter])
        rate = optimizer.param_groups[0]["lr"]
        OptimizerShards(optimizer, {"weight": parameter}).state_dict()
        assert torch.equal(parameter, torch.ones(5))
        assert torch.equal(parameter.grad, torch.full((5,), 3.0))
        assert optimizer.param_groups[0]["lr"] is rate
