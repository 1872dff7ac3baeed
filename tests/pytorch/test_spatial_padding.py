# SPDX-License-Identifier: Apache-2.0
"""Padding and dropout of cut tensors against whole ones, on ranks as threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from spatial_reference import (
    NEAR,
    CutGrid,
    difference,
    drawn,
    off_by,
    on_grids,
    piece,
)
from torch.nn import functional

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.spatial import Cut
from commrt.layers.spatial.dropout import dropout
from commrt.layers.spatial.padding import pad
from commrt.local import run


def check_padding(rng: random.Random, grid: CutGrid, dims: int) -> float:
    """Return how far one drawn padding is from torch's."""
    mode = rng.choice(("constant", "reflect", "replicate", "circular"))
    value = {"value": 2.5} if mode == "constant" else {}
    shape = [rng.randint(1, 2), 2, *(rng.randint(4, 8) for _ in range(dims))]
    low = -1 if mode == "constant" else 0
    number = dims if mode != "constant" else rng.randint(1, dims)
    pads = [rng.randint(low, 3) for _ in range(2 * number)]
    cuts = grid.cuts(rng, shape)
    found = difference(
        *(grid, cuts, drawn(rng, shape), []),
        lambda x: pad(x, pads, mode, cuts=cuts, **value),
        lambda x: functional.pad(x, pads, mode, **value),
        rng,
    )
    assert found.largest < NEAR, (found.of, mode, shape, pads, cuts)
    return found.largest


def test_any_padding_is_that_of_the_whole(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        check_padding(rng, grid, dims)

    on_grids(seed, 20, check)


def test_one_rank_has_the_bits_of_torch(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        assert check_padding(rng, grid, dims) == 0

    on_grids(seed, 20, check, [(1,)])


def test_bytes_are_those_of_the_formula() -> None:
    """A row before 8 rows: 9 rows in pieces of 4 and 5, of which 1 has moved."""

    def main(comm: Communicator) -> None:
        x = torch.zeros(1, 3, 4, 6)
        pad(x, [0, 0, 1, 0], cuts={2: Cut.even(comm, 8)})

    with commrt.trace.record() as recording:
        run(2, main)
    volumes = [log.volume(("op",)) for log in recording.logs()]
    (sent,) = [volume["send",] for volume in volumes if ("send",) in volume]
    assert sent.nbytes == 3 * 6 * 4


@pytest.mark.parametrize(
    ("pads", "mode", "message"),
    [
        ([1], "constant", r"pads=\(1,\)"),
        ([1] * 6, "constant", "at most 2 spatial"),
        ([-1, 0], "reflect", "below 0"),
        ([8, 0], "reflect", "at most 7"),
        ([1, 1], "mirror", "mode='mirror'"),
        ([-8, 0], "constant", "empty result"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sent(
    pads: list[int], mode: str, message: str
) -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=message):
            pad(torch.zeros(1, 1, 4, 8), pads, mode, cuts={2: Cut.even(comm, 8)})

    with commrt.trace.record() as recording:
        run(2, main)
    assert recording.logs() == []


def test_any_cut_drops_the_same_elements(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        shape = [rng.randint(1, 4), 3, *(rng.randint(1, 8) for _ in range(dims))]
        cuts = grid.cuts(rng, shape)
        drawing: dict[str, Any] = {
            "p": rng.choice((0.0, 0.2, 0.5, 1.0)),
            "seed": rng.randrange(-(1 << 70), 1 << 70),
            "whole_channels": rng.random() < 0.3,
        }
        found = difference(
            *(grid, cuts, drawn(rng, shape), []),
            lambda x: (dropout(x, cuts=cuts, **drawing), cuts),
            lambda x: dropout(x, cuts={}, **drawing),
            rng,
        )
        assert found.largest == 0

    on_grids(seed, 15, check)


def test_dropout_keeps_the_mean_and_draws_anew() -> None:
    x = torch.ones(50, 20, 40, dtype=torch.float64)
    masks = [dropout(x, 0.3, seed=number, cuts={}) == 0 for number in range(5)]
    for mask in masks:
        # 40,000 draws: 5 deviations are 0.0115.
        assert abs(float(mask.double().mean()) - 0.3) < 0.0115
    for one in range(5):
        for other in range(one):
            both = float((masks[one] & masks[other]).double().mean())
            assert abs(both - 0.09) < 0.0072
    neighbours = float((masks[0][..., 1:] & masks[0][..., :-1]).double().mean())
    assert abs(neighbours - 0.09) < 0.0072
    kept = dropout(x, 0.3, seed=0, cuts={})
    assert float(kept.max()) == 1 / (1 - 0.3)
    assert dropout(x, 0.3, seed=0, cuts={}, training=False) is x


def test_channels_are_dropped_as_a_whole() -> None:
    x = torch.ones(40, 50, 3, 3)
    kept = dropout(x, 0.5, seed=3, cuts={}, whole_channels=True)
    sums = kept.sum((2, 3))
    assert {*sums.unique().tolist()} == {0.0, 18.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 1.5}, "p=1.5"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"cuts": {7: None}}, r"cuts\[7\]"),
        ({"x": torch.zeros(3), "whole_channels": True}, "whole_channels=True"),
    ],
)
def test_wrong_arguments_of_dropout(change: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.zeros(2, 3, 4), "seed": 1, "cuts": {}, **change}
    with pytest.raises(UsageError, match=message):
        dropout(**arguments)


def test_a_piece_that_does_not_fit_its_cut() -> None:
    def main(comm: Communicator) -> None:
        whole = torch.zeros(2, 3, 8)
        cuts = {2: Cut.even(comm, 8)}
        assert (
            off_by(dropout(piece(whole, cuts), seed=1, cuts=cuts), whole[..., :4]) == 0
        )
        with pytest.raises(UsageError, match=r"cuts\[2\]"):
            dropout(whole, seed=1, cuts=cuts)

    run(2, main)
