# SPDX-License-Identifier: Apache-2.0
"""Unmodified modules of torch on tensors that are cut in space, against one process."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from dist_tensor_cases import drawn, leaf, off_by
from torch import nn

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement, Sharded
from commrt.local import run

NEAR = 1e-12


def network(dims: int) -> nn.Module:
    """Return convolutions, poolings, normalizations and a residual sum, in float64."""
    conv, up = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
    pool, mean = getattr(nn, f"MaxPool{dims}d"), getattr(nn, f"AvgPool{dims}d")

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = conv(4, 4, 3, padding=1, bias=False)
            self.norm = getattr(nn, f"BatchNorm{dims}d")(4)
            self.two = conv(4, 4, 3, padding=2, dilation=2, padding_mode="replicate")
            self.groups = nn.GroupNorm(2, 4)

        def forward(self, x: Any) -> Any:
            inner = nn.functional.relu(self.norm(self.one(x)))
            return torch.relu(self.groups(self.two(inner)) + x)

    down = [conv(2, 4, 5, stride=2, padding=2), nn.GELU(), pool(3, 2, 1), Residual()]
    return nn.Sequential(*down, mean(2, 1), up(4, 3, 2, stride=2), nn.Tanh()).double()


CASES = [
    (1, {"w": 3}, Placement(None, None, "w")),
    (2, {"d": 2, "h": 2}, Placement("d", None, "h", None)),
    (2, {"h": 2, "w": 2}, Placement(None, None, "h", "w")),
    (2, {"h": 3}, Placement(None, None, Sharded("h", sizes=(1, 14, 6)), None)),
    (2, {"h": 2, "w": 2}, Placement(None, None, ("h", "w"), None)),
    (3, {"h": 2, "w": 2}, Placement(None, None, "h", None, "w")),
]


@pytest.mark.parametrize(("dims", "axes", "placement"), CASES)
def test_a_network_has_the_outputs_and_gradients_of_one_process(
    dims: int, axes: dict[str, int], placement: Placement, seed: int
) -> None:
    rng = random.Random(seed)
    whole = drawn(rng, (3, 2, *(21, 17, 13)[:dims]))
    serial = network(dims)
    untouched = copy.deepcopy(serial)
    one = whole.clone().requires_grad_()
    expected = serial(one)
    expected.square().sum().backward()
    buffers = [*serial.buffers()]

    def main(comm: Any) -> None:
        mine = copy.deepcopy(untouched)
        with ProcessGrid(comm, axes) as grid:
            x = leaf(whole, grid, placement)
            y = mine(x)
            assert y.shape == expected.shape
            assert off_by(y.whole(), expected) < NEAR
            y.square().sum().redistribute().backward()
            assert x.grad is not None
            assert off_by(x.grad.whole(), one.grad) < NEAR
            for got, right in zip(mine.parameters(), serial.parameters(), strict=True):
                assert off_by(got.grad, right.grad) < NEAR
            for got, right in zip(mine.buffers(), buffers, strict=True):
                assert off_by(got.double(), right.double()) < NEAR

    ranks = 1
    for size in axes.values():
        ranks *= size
    run(ranks, main)


def test_a_classifier_ends_in_whole_means(seed: int) -> None:
    rng = random.Random(seed)
    whole = drawn(rng, (4, 3, 11, 9))

    def made() -> nn.Module:
        up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        body = [nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True), nn.AdaptiveMaxPool2d((6, 5))]
        head = [nn.AdaptiveAvgPool2d((3, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(up, *body, *head).double()

    serial = made()
    one = whole.clone().requires_grad_()
    expected = serial(one)
    expected.square().sum().backward()

    def main(comm: Any) -> None:
        mine = copy.deepcopy(serial)
        mine.zero_grad()
        with ProcessGrid(comm, {"d": 2, "h": 2}) as grid:
            x = leaf(whole, grid, Placement("d", None, "h", None))
            y = mine(x)
            assert y.placement.is_same_as(Placement("d", None), grid, y.shape)
            assert off_by(y.whole(), expected) < NEAR
            y.square().sum().redistribute().backward()
            assert x.grad is not None
            assert off_by(x.grad.whole(), one.grad) < NEAR
            for got, right in zip(mine.parameters(), serial.parameters(), strict=True):
                assert off_by(got.grad, right.grad) < NEAR

    run(4, main)


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (Placement(None, Sharded("a", block=1), None, None), "cut in one piece"),
        (Placement(None, None, Sharded("a", block=1), None), "cut in one piece"),
        (Placement(None, None, None, None, partial="a"), "redistribute\\(\\) it first"),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    placement: Placement, says: str
) -> None:
    whole = torch.ones(1, 2, 6, 6)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            x = DistTensor.from_whole(whole, grid, placement)
            with pytest.raises(UsageError, match=says):
                nn.Conv2d(2, 2, 3)(x)
            with pytest.raises(UsageError, match=says):
                nn.functional.max_pool2d(x, 2)

    run(2, main)
