# SPDX-License-Identifier: Apache-2.0
"""Adaptive pooling of cut tensors against whole ones, on ranks as threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from spatial_reference import NEAR, CutGrid, difference, drawn, on_grids

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.spatial import Cut
from commrt.layers.spatial.adaptive_pooling import (
    AVG,
    MAX,
    adaptive_avg_pool,
    adaptive_max_pool,
)
from commrt.local import run


def check_adaptive(rng: random.Random, grid: CutGrid, dims: int) -> float:
    """Return how far one drawn pooling is from torch's."""
    shape = [rng.randint(1, 3), 2, *(rng.randint(1, 9) for _ in range(dims))]
    size = [rng.choice((1, None, rng.randint(1, 7))) for _ in range(dims)]
    pool, plain = rng.choice(
        ((adaptive_avg_pool, AVG[dims]), (adaptive_max_pool, MAX[dims]))
    )
    whole = [n if m is None else m for n, m in zip(shape[2:], size, strict=True)]
    cuts = grid.cuts(rng, shape)
    found = difference(
        *(grid, cuts, drawn(rng, shape), []),
        lambda x: pool(x, size, cuts=cuts),
        lambda x: plain(x, whole),
        rng,
    )
    assert found.largest < NEAR, (found.of, pool, shape, size, cuts)
    return found.largest


def test_any_pooling_is_that_of_the_whole(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        check_adaptive(rng, grid, dims)

    on_grids(seed, 40, check)


def test_one_rank_has_the_bits_of_torch(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        assert check_adaptive(rng, grid, dims) == 0

    on_grids(seed, 20, check, [(1,)])


@pytest.mark.parametrize("pool", [adaptive_avg_pool, adaptive_max_pool])
def test_bytes_are_those_of_the_formula(pool: Any) -> None:
    """One output of everything: each rank but the last sends one part of it."""

    def main(comm: Communicator) -> None:
        pool(torch.zeros(2, 3, 4, 6), 1, cuts={2: Cut.even(comm, 12)})

    with commrt.trace.record() as recording:
        run(3, main)
    volumes = [log.volume(("op",)) for log in recording.logs()]
    sent = [volume["send",].nbytes for volume in volumes if ("send",) in volume]
    assert sent == [2 * 3 * 4] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_size": 0}, "output_size=0"),
        ({"output_size": (1, 2, 3)}, "2 of them"),
        ({"x": torch.zeros(1, 1, 3, 8)}, r"cuts\[2\]"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sent(
    change: dict[str, Any], message: str
) -> None:
    def main(comm: Communicator) -> None:
        arguments = {
            "x": torch.zeros(1, 1, 4, 8),
            "output_size": 2,
            "cuts": {2: Cut.even(comm, 8)},
            **change,
        }
        with pytest.raises(UsageError, match=message):
            adaptive_avg_pool(**arguments)

    with commrt.trace.record() as recording:
        run(2, main)
    assert recording.logs() == []
