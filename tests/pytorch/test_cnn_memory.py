# SPDX-License-Identifier: Apache-2.0
"""A rank keeps its share of activations for the backward pass, and halos."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cnn_networks import ResNet50, UNet3d, cosmoflow, meshnet
from saved_memory import HaloBytes, saved_nbytes
from torch import nn

from commrt.layers.cnn import ParallelStrategy, parallelize_cnn
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (lambda: ResNet50(4, 7), (1, 3, 256, 64)),
    "unet": (lambda: UNet3d(2, 2), (1, 2, 64, 16, 16)),
    "cosmoflow": (lambda: cosmoflow(2, 64, 2, dropout=0.0), (1, 2, 64, 64, 64)),
    "meshnet": (lambda: meshnet(4, 3, norm=True, dropout=0.0), (1, 1, 64, 8, 8)),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_rank_keeps_its_share_of_activations(name: str, ranks: int) -> None:
    make, shape = NETWORKS[name]
    whole = torch.ones(shape)
    serial = make()
    halo = HaloBytes(serial, {2: ranks})
    everything = saved_nbytes(serial, whole)

    def main(comm: Any) -> int:
        with ProcessGrid(comm, {"a": ranks}) as grid:
            space = ParallelStrategy(**{("depth", "height")[len(shape) == 4]: "a"})
            return saved_nbytes(parallelize_cnn(make(), grid, space), whole)

    most = max(run(ranks, main))
    share = halo.nbytes / (everything / ranks)
    bound = everything / ranks * (1 + share) * 1.05
    assert most <= bound, (most / (everything / ranks), share)


@pytest.mark.parametrize("name", NETWORKS)
def test_two_cut_dimensions_leave_a_rank_its_share(name: str) -> None:
    make, shape = NETWORKS[name]
    shape = (*shape[:3], shape[2], *shape[4:])
    if name == "unet":
        shape = (*shape[:3], 32, *shape[4:])
    whole = torch.ones(shape)
    serial = make()
    halo = HaloBytes(serial, {2: 2, 3: 2})
    everything = saved_nbytes(serial, whole)
    names = ("height", "width") if len(shape) == 4 else ("depth", "height")
    cut = ParallelStrategy(**dict(zip(names, "ab", strict=True)))

    def main(comm: Any) -> int:
        with ProcessGrid(comm, {"a": 2, "b": 2}) as grid:
            return saved_nbytes(parallelize_cnn(make(), grid, cut), whole)

    most = max(run(4, main))
    share = halo.nbytes / (everything / 4)
    assert most <= everything / 4 * (1 + share) * 1.05, (most, everything, share)


@pytest.mark.parametrize("ranks", [2, 4])
def test_cut_channels_leave_a_rank_its_share(ranks: int) -> None:
    whole = torch.ones(2, 8, 16, 16)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]

    def make() -> nn.Module:
        return nn.Sequential(*layers, nn.Conv2d(8, 8, 1), nn.GELU())

    everything = saved_nbytes(make(), whole)

    def main(comm: Any) -> int:
        with ProcessGrid(comm, {"a": ranks}) as grid:
            strategy = ParallelStrategy(channel="a", filter="a", stationary="x")
            model = nn.Sequential(*layers, nn.Conv2d(8, 8, 1), nn.GELU())
            # Ranks are threads here: each needs modules of its own for its hooks.
            mine = parallelize_cnn(copy.deepcopy(model), grid, strategy)
            return saved_nbytes(mine, whole)

    assert max(run(ranks, main)) <= everything / ranks * 1.05
