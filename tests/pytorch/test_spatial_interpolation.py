# SPDX-License-Identifier: Apache-2.0
"""Interpolation of cut tensors against whole ones, on ranks as threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from spatial_reference import NEAR, CutGrid, difference, drawn, on_grids
from torch.nn import functional

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.spatial import Cut
from commrt.layers.spatial.interpolation import LINEAR, interpolate
from commrt.local import run


def check_interpolation(rng: random.Random, grid: CutGrid, dims: int) -> float:
    """Return how far one drawn interpolation is from torch's.

    None has twice as many outputs by another factor than 2: of "nearest", the gradient
    that torch computes then is not that of its result.
    """
    shape = [rng.randint(1, 2), 2, *(rng.randint(1, 9) for _ in range(dims))]
    arguments: dict[str, Any] = {
        "mode": rng.choice(("nearest", "nearest-exact", LINEAR[dims], LINEAR[dims]))
    }
    if arguments["mode"] == LINEAR[dims]:
        arguments["align_corners"] = rng.random() < 0.5
    if rng.random() < 0.5:
        arguments["size"] = [rng.randint(1, 14) for _ in range(dims)]
    else:
        factors = [rng.choice((0.5, 0.7, 1, 1.5, 2, 2.6)) for _ in range(dims)]
        arguments["scale_factor"] = [
            f if f * n >= 1 else 2 for f, n in zip(factors, shape[2:], strict=True)
        ]
    cuts = grid.cuts(rng, shape)
    found = difference(
        *(grid, cuts, drawn(rng, shape), []),
        lambda x: interpolate(x, cuts=cuts, **arguments),
        lambda x: functional.interpolate(x, **arguments),
        rng,
    )
    assert found.largest < NEAR, (found.of, shape, arguments, cuts)
    return found.largest


def test_any_interpolation_is_that_of_the_whole(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        check_interpolation(rng, grid, dims)

    on_grids(seed, 30, check)


def test_one_rank_has_the_bits_of_torch(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        assert check_interpolation(rng, grid, dims) == 0

    on_grids(seed, 20, check, [(1,)])


@pytest.mark.parametrize(("mode", "rows"), [("nearest", 0), ("bilinear", 2)])
def test_bytes_are_those_of_the_formula(mode: str, rows: int) -> None:
    """Both ranks have outputs between the last row of one and the next."""

    def main(comm: Communicator) -> None:
        interpolate(
            torch.zeros(1, 3, 4, 6),
            scale_factor=2,
            mode=mode,
            cuts={2: Cut.even(comm, 8)},
        )

    with commrt.trace.record() as recording:
        run(2, main)
    volumes = [log.volume(("op",)) for log in recording.logs()]
    sent = [volume["send",].nbytes for volume in volumes if ("send",) in volume]
    assert sum(sent) == rows * 3 * 6 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "bicubic"}, "mode='bicubic'"),
        ({"mode": "linear"}, "mode='linear'"),
        ({"size": (4, 4)}, "give one of them"),
        ({"scale_factor": None}, "give one of them"),
        ({"scale_factor": -1.0}, "scale_factor=-1.0"),
        ({"scale_factor": (1.0, 2.0, 3.0)}, "or 2 of them"),
        ({"scale_factor": 0.1}, "empty result"),
        ({"align_corners": True}, "align_corners=True"),
        ({"x": torch.zeros(1, 1, 3, 8)}, r"cuts\[2\]"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sent(
    change: dict[str, Any], message: str
) -> None:
    def main(comm: Communicator) -> None:
        arguments = {
            "x": torch.zeros(1, 1, 4, 8),
            "scale_factor": 2.0,
            "cuts": {2: Cut.even(comm, 8)},
            **change,
        }
        with pytest.raises(UsageError, match=message):
            interpolate(**arguments)

    with commrt.trace.record() as recording:
        run(2, main)
    assert recording.logs() == []
