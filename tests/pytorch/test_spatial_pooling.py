# SPDX-License-Identifier: Apache-2.0
"""Pooling of cut tensors against whole ones, on ranks as threads."""

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
from commrt.layers.spatial.pooling import AVG, MAX, avg_pool, max_pool
from commrt.local import run


def draw_windows(rng: random.Random, dims: int) -> tuple[list[int], dict[str, Any]]:
    """Return a shape, and arguments that torch takes for it."""
    kernel = [rng.randint(1, 5) for _ in range(dims)]
    arguments: dict[str, Any] = {
        "kernel_size": kernel,
        "padding": [rng.randint(0, k // 2) for k in kernel],
        "ceil_mode": rng.random() < 0.5,
    }
    if rng.random() < 0.7:
        arguments["stride"] = [rng.randint(1, 3) for _ in range(dims)]
    shape = [rng.randint(1, 3), 2, *(k + rng.randint(0, 6) for k in kernel)]
    return shape, arguments


def without_overlap(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "overlap"}


def check_pool(rng: random.Random, grid: CutGrid, dims: int) -> float:
    """Return how far one drawn pooling is from torch's."""
    shape, arguments = draw_windows(rng, dims)
    if rng.random() < 0.5:
        cut_pool: Any = max_pool
        plain = MAX[dims]
        if rng.random() < 0.3:
            arguments["dilation"] = 2
            shape[2:] = [n + 4 for n in shape[2:]]
    else:
        cut_pool, plain = avg_pool, AVG[dims]
        arguments["count_include_pad"] = rng.random() < 0.5
        if dims > 1 and rng.random() < 0.2:
            arguments["divisor_override"] = rng.randint(1, 5)
    arguments["overlap"] = rng.random() < 0.6
    cuts = grid.cuts(rng, shape)
    found = difference(
        *(grid, cuts, drawn(rng, shape), []),
        lambda x: cut_pool(x, cuts=cuts, **arguments),
        lambda x: plain(x, **without_overlap(arguments)),
        rng,
    )
    assert found.largest < NEAR, (found.of, shape, arguments, cuts)
    return found.largest


def test_any_pooling_is_that_of_the_whole(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        check_pool(rng, grid, dims)

    on_grids(seed, 40, check)


def test_one_rank_has_the_bits_of_torch(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        assert check_pool(rng, grid, dims) == 0

    on_grids(seed, 20, check, [(1,)])


@pytest.mark.parametrize(("stride", "rows"), [(2, 0), (1, 1)])
def test_bytes_are_those_of_the_formula(stride: int, rows: int) -> None:
    """Windows of 2 rows that lie side by side need nothing of other ranks."""

    def main(comm: Communicator) -> None:
        x = torch.zeros(1, 3, 4, 6)
        max_pool(x, 2, stride=stride, cuts={2: Cut.even(comm, 8)})
        avg_pool(x, 2, stride=stride, cuts={2: Cut.even(comm, 8)})

    with commrt.trace.record() as recording:
        run(2, main)
    sent = [
        volume.nbytes
        for log in recording.logs()
        for (op,), volume in log.volume(("op",)).items()
        if op == "send"
    ]
    assert sum(sent) == 2 * rows * 3 * 6 * 4


@pytest.mark.parametrize(
    ("pool", "change", "message"),
    [
        (max_pool, {"kernel_size": 0}, "kernel_size=0"),
        (max_pool, {"kernel_size": 9}, "empty result"),
        (max_pool, {"padding": 2}, "padding=2"),
        (avg_pool, {"divisor_override": 0}, "divisor_override=0"),
        (avg_pool, {"stride": (1, 1, 1)}, r"stride=\(1, 1, 1\)"),
        (avg_pool, {"x": torch.zeros(1, 1, 3, 8)}, r"cuts\[2\]"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sent(
    pool: Any, change: dict[str, Any], message: str
) -> None:
    def main(comm: Communicator) -> None:
        arguments = {
            "x": torch.zeros(1, 1, 4, 8),
            "kernel_size": 3,
            "cuts": {2: Cut.even(comm, 8)},
            **change,
        }
        with pytest.raises(UsageError, match=message):
            pool(**arguments)

    with commrt.trace.record() as recording:
        run(2, main)
    assert recording.logs() == []
