# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors drawn by a seed, and whole ones to compare with."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from layout_cases import draw_sizes

from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement, Sharded

SHAPES = [
    *({"a": 1}, {"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 2}),
    {"a": 2, "b": 1, "c": 2},
]
"""Grids: one rank, primes, and axes of one place."""


def drawn(rng: random.Random, shape: Any, *, whole_numbers: bool = False) -> Any:
    """Return a tensor in float64 with the same elements on every rank."""
    draws = np.random.default_rng(rng.randrange(1 << 30))
    if whole_numbers:
        return torch.from_numpy(draws.integers(-4, 5, tuple(shape)).astype(np.float64))
    return torch.from_numpy(draws.standard_normal(tuple(shape)))


def draw_placement(
    rng: random.Random, grid: ProcessGrid, shape: Any, *, partial: bool = False
) -> Placement:
    """Return any placement of a tensor: even, uneven, dealt out, or whole."""
    free = [*grid.axes]
    rng.shuffle(free)
    dims: list[Any] = []
    for extent in shape:
        kind = rng.choice(("even", "sizes", "block", "whole"))
        if kind == "whole" or not free:
            dims.append(None)
            continue
        axes = tuple(free.pop() for _ in range(rng.choice((1, 1, len(free)))))
        if kind == "even":
            dims.append(Sharded(axes))
        elif kind == "block":
            dims.append(Sharded(axes, block=rng.randint(1, 3)))
        else:
            sizes = draw_sizes(rng, extent, grid.size(axes))
            dims.append(Sharded(axes, sizes=sizes))
    open_sums = [axis for axis in free if partial and rng.random() < 0.6]
    return Placement(*dims, partial=open_sums)


def leaf(whole: Any, grid: ProcessGrid, placement: Placement) -> DistTensor:
    """Return this rank's part of a tensor, as a leaf that has gradients."""
    part = DistTensor.from_whole(whole.detach(), grid, placement)
    local = part.local.detach().clone().requires_grad_()
    return DistTensor(local, part.shape, grid, placement)


def off_by(found: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest element."""
    found, expected = found.detach(), expected.detach()
    if expected.numel() == 0:
        assert found.shape == expected.shape
        return 0.0
    scale = max(float(expected.abs().max()), 1e-300)
    return float((found - expected).abs().max()) / scale
